"""How long it takes to simulate many whole training runs, and whether they are right.

    python benchmarks/training_runs.py
    python benchmarks/training_runs.py --check-spares

The job is Llama 3.1 405B on 16,384 H100, with the interruptions of Llama 3's 54 days.
`--check-spares` compares runs with few spares with a simulation from event to event in plain Python
(`tests/runs_by_events.py`).
"""

import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
import prism_jax as prism
from prism_jax.data import Failures, load_failures
from prism_jax.runs import RunCosts, best_interval
from tests.runs_by_events import run_by_events
from validation.tables import options


DAY = 86_400.0
_JOB = "llama-3.1-405b-h100-65536"
_LAYOUT = ["layout.cp=1", "layout.dp=128", "num_nodes=2048", "schedule.num_microbatches=16"]
_RUNS, _STEPS, _COMPARED, _EVENTS = 100_000, 1_000_000, 4096, 1000
_DAYS = 20  # Of work, in runs that are compared.


def main() -> None:
    given = options(__doc__, check_spares=(False, "compare with a simulation of events"))
    for text in _checked() if given.check_spares else [_measured()]:
        print(text, flush=True)


def _measured() -> str:
    """Seconds from a job to the law of its runs, compilation included."""
    start, before = time.perf_counter(), _cpu_seconds()
    program = prism.compile_job(prism.load_job(_JOB, _LAYOUT))
    law = prism.training_run(program, num_steps=_STEPS, num_runs=_RUNS, key=jax.random.key(0))
    cpu, wall = _cpu_seconds() - before, time.perf_counter() - start
    times = f"{cpu:.0f} CPU s, {wall:.0f} s; mean {law.mean.value:.4g} days"
    each = f"{sum(law.interruptions.values()):,.0f} interruptions each"
    return f"{_RUNS:,} runs of {_STEPS:,} steps, with {each}: {times}"


def _checked() -> Iterator[str]:
    """The mean days of runs, here and from event to event, with their standard errors."""
    llama = load_failures("llama-3")
    hours = llama.device_hours / 16_384
    lose = sum(cause.count for cause in llama.causes if not cause.announced)
    costs = RunCosts(best_interval(lose / (hours * 3600), 30.0), 30.0, 600.0, repair_s=DAY)
    step = prism.compile_graph([prism.Op(1.0)])
    rates = [cause.count / (hours * 3600) for cause in llama.causes]
    keys: Any = {"failures": Failures(hours, llama.causes, 0.0, 30.0, "made"), "costs": costs}
    keys |= {"num_steps": round(_DAYS * DAY), "num_runs": _COMPARED, "known_rates": True}
    for spares in (2, 6, 20):
        law = prism.training_run(step, num_spares=spares, key=jax.random.key(0), **keys)
        mean = law.mean
        run = (random.Random(0), _DAYS * DAY, llama.causes, rates, costs, spares)
        events = [run_by_events(*run)[0] / DAY for _ in range(_EVENTS)]
        theirs, error = statistics.fmean(events), statistics.stdev(events) / math.sqrt(_EVENTS)
        apart = (mean.value - theirs) / math.hypot(error, mean.standard_error)
        ours = f"{spares} spares: {mean.value:.3f} +- {mean.standard_error:.3f} days"
        events = f"event by event {theirs:.3f} +- {error:.3f}; {apart:+.1f} standard errors apart"
        yield f"{ours}; {events}"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
