"""How long it takes to simulate many whole training runs.

    python benchmarks/training_runs.py         # a line; --json for one JSON object

The job is Llama 3.1 405B on 16,384 H100, with the interruptions of Llama 3's 54 days.
"""

import argparse
import json
import resource
import time

import jax

import prism_jax as prism


_JOB = "llama-3.1-405b-h100-65536"
_LAYOUT = ["layout.cp=1", "layout.dp=128", "num_nodes=2048", "schedule.num_microbatches=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    arguments = parser.parse_args()
    found = measured(arguments.runs, arguments.steps)
    text = (
        "{runs:,} runs of {steps:,} steps, with {interruptions:,.0f} interruptions each: "
        "{cpu_s:.0f} CPU s, {wall_s:.0f} s; mean {days:.4g} days"
    )
    print(json.dumps(found) if arguments.json else text.format(**found))


def measured(num_runs: int, num_steps: int) -> dict[str, float]:
    """Seconds from a job to the law of its runs, compilation included."""
    start, before = time.perf_counter(), _cpu_seconds()
    program = prism.compile_job(prism.load_job(_JOB, _LAYOUT))
    law = prism.training_run(program, num_steps=num_steps, num_runs=num_runs, key=jax.random.key(0))
    return {
        "runs": num_runs,
        "steps": num_steps,
        "interruptions": sum(law.interruptions.values()),
        "days": law.mean.value,
        "cpu_s": _cpu_seconds() - before,
        "wall_s": time.perf_counter() - start,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
