"""How long it takes to simulate many whole training runs, and whether they are right.

    python benchmarks/training_runs.py         # a line; --json for one JSON object
    python benchmarks/training_runs.py --check-spares

The job is Llama 3.1 405B on 16,384 H100, with the interruptions of Llama 3's 54 days.
`--check-spares` compares runs with few spares, and with checkpoints in the background, with a
simulation from event to event in plain Python (`_runs_by_events.py`).
"""

import argparse
import json
import math
import pathlib
import random
import resource
import statistics
import sys
import time

import jax

import prism_jax as prism


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks._runs_by_events import run_by_events
from prism_jax.data import Cause, Failures, load_failures
from prism_jax.runs import RunCosts, best_interval


DAY = 86_400.0
_JOB = "llama-3.1-405b-h100-65536"
_LAYOUT = ["layout.cp=1", "layout.dp=128", "num_nodes=2048", "schedule.num_microbatches=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--check-spares", action="store_true", help="compare with a simulation of events"
    )
    arguments = parser.parse_args()
    if arguments.check_spares:
        rows = checked()
        if arguments.json:
            print(json.dumps(rows))
            return
        for row in rows:
            print(
                "{run}: {days:.3f} +- {days_error:.3f} days; event by event {events:.3f} +- "
                "{events_error:.3f}; {apart:+.1f} standard errors apart".format(**row)
            )
        return
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


def checked(num_events: int = 1000, num_runs: int = 4096) -> list[dict[str, str | float]]:
    """The mean days of runs, here and from event to event, with their standard errors."""
    llama = load_failures("llama-3")
    hours = llama.device_hours / 16_384
    lose = sum(cause.count for cause in llama.causes if not cause.announced)
    costs = RunCosts(best_interval(lose / (hours * 3600), 30.0), 30.0, 600.0, repair_s=DAY)
    often = (Cause(name="planned", count=200, announced=True), Cause(name="gpu", count=100))
    slow = RunCosts(1000.0, 30.0, 600.0, background_s=900.0)
    cases = (
        *((f"{n} spares", 20, llama.causes, hours, costs, n) for n in (2, 6, 20)),
        ("background_s = 900", 2, often, 300.0, slow, None),
    )
    step = prism.compile_graph([prism.Op(1.0)])
    rows: list[dict[str, str | float]] = []
    for name, days, causes, watched, costs, spares in cases:
        failures = Failures(watched, causes, 0.0, 30.0, "made")
        law = prism.training_run(
            step,
            num_steps=round(days * DAY),
            key=jax.random.key(0),
            failures=failures,
            costs=costs,
            num_spares=spares,
            known_rates=True,
            num_runs=num_runs,
        )
        rng, rates = random.Random(0), [cause.count / (watched * 3600) for cause in causes]
        events = [
            run_by_events(rng, days * DAY, causes, rates, costs, spares)[0] / DAY
            for _ in range(num_events)
        ]
        mean, error = statistics.fmean(events), statistics.stdev(events) / math.sqrt(num_events)
        rows.append(
            {
                "run": name,
                "days": law.mean.value,
                "days_error": law.mean.standard_error,
                "events": mean,
                "events_error": error,
                "apart": (law.mean.value - mean) / math.hypot(error, law.mean.standard_error),
            }
        )
    return rows


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
