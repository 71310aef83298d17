"""A whole run in plain Python, from event to event: what the simulated cycles must agree with."""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence

from prism_jax.data import Cause
from prism_jax.runs import RunCosts


def run_by_events(
    rng: random.Random,
    work_s: float,
    causes: Sequence[Cause],
    rates: Sequence[float],
    costs: RunCosts,
    num_spares: int | None = None,
    week_shape: float = math.inf,
) -> tuple[float, float]:
    """The seconds that one run takes, and how many of them it waits for a spare.

    **Arguments:**

    - `rng`: the source of all random numbers.
    - `work_s`: the work of the run, in seconds.
    - `causes`, `rates`: the causes and their interruptions per second of the whole job.
    - `costs`, `num_spares`: as in `training_run`.
    - `week_shape`: the shape of the gamma law of the factors of weeks; infinite if all are alike.
    """
    stretch = 1 + costs.evaluation_s / costs.interval_s
    clock = began = waited = done = safe = 0.0
    spares = math.inf if num_spares is None else num_spares
    missing = 0  # Nodes that the run lacks.
    repaired: list[float] = []  # When nodes come back, a heap.
    written: deque[tuple[float, float]] = deque()  # Checkpoints: when they are safe, and the work.
    phase, ends = "work", min(costs.interval_s, work_s) * stretch
    interruption = rng.expovariate(sum(rates))
    factor, week = 1.0, 0.0 if week_shape < math.inf else math.inf
    while True:
        next_node = repaired[0] if repaired else math.inf
        next_safe = written[0][0] if written else math.inf
        before, clock = clock, min(ends, interruption, next_node, next_safe, week)
        waited += (clock - before) * (phase == "wait")
        if clock == week:
            # What is to come of an exponential time is one again, at the rate of the new week.
            factor = rng.gammavariate(week_shape, 1 / week_shape)
            interruption = clock + rng.expovariate(factor * sum(rates))
            week += 7 * 86_400
        elif clock == next_safe:
            safe = written.popleft()[1]
        elif clock == next_node:
            heapq.heappop(repaired)
            spares, missing = (spares, missing - 1) if missing else (spares + 1, 0)
            if phase == "wait" and not missing:
                phase, ends = "restart", clock + costs.restart_s
        elif clock == interruption:
            interruption = clock + rng.expovariate(factor * sum(rates))
            cause = rng.choices(causes, rates)[0]
            if cause.announced and phase in ("work", "checkpoint"):
                safe = done + (clock - began) / stretch * (phase == "work")
            done = safe
            written.clear()
            if cause.takes_node:
                heapq.heappush(repaired, clock + _repair(rng, costs))
                spares, missing = (spares - 1, missing) if spares else (0, missing + 1)
            phase, ends = "notice", clock + cause.detection_s
        elif phase == "notice" and missing:
            phase, ends = "wait", math.inf
        elif phase == "notice":
            phase, ends = "restart", clock + costs.restart_s
        elif phase == "work" and done + costs.interval_s >= work_s:
            return clock, waited
        elif phase == "work":
            done += costs.interval_s
            phase, ends = "checkpoint", clock + costs.blocking_s
        else:
            if phase == "checkpoint":
                written.append((clock + costs.background_s, done))
            phase, began = "work", clock
            ends = clock + min(costs.interval_s, work_s - done) * stretch


def _repair(rng: random.Random, costs: RunCosts) -> float:
    """The seconds of one repair."""
    if not costs.repair_power:
        return costs.repair_s
    scale = costs.repair_s / math.gamma(1 + costs.repair_power)
    return rng.weibullvariate(scale, 1 / costs.repair_power)
