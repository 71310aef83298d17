"""Nodes and links that are slow for a while, and what finding them saves."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from ..data import Slow


# Events of runs that are simulated side by side.
_EVENTS = 1e6


def slowed(
    work: float,
    kinds: Sequence[Slow],
    rates: Float[np.ndarray, "runs kinds"],
    find_s: float,
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, "runs"], Int[np.ndarray, "runs"]]:
    """How many seconds slow events add to runs of so many seconds of work, and how many are found.

    Events begin at a constant rate while steps are executed, whatever else is slow. A step is as
    slow as the slowest of the events during it. Those that last longer than `find_s` are found and
    end then. The time to replace a node is not in the seconds. Source of such events:
    GREYHOUND, ATC 2025 (arXiv:2410.12588).

    **Arguments:**

    - `work`: the work of each run, in seconds without slow events.
    - `kinds`, `rates`: the events, and how often each kind begins per second of the whole job.
    - `find_s`: after how many seconds a slow node is found; infinite if never.
    - `rng`: draws the same events whatever `find_s`.
    """
    horizon = work * max(kind.slowdown for kind in kinds)  # No run takes longer.
    groups = np.array_split(rates, math.ceil(1 + horizon * rates.sum() / _EVENTS))
    found = [_slowed(work, horizon, kinds, group, find_s, rng) for group in groups]
    added, number = map(np.concatenate, zip(*found, strict=True))
    return added, number


def _slowed(work, horizon, kinds, rates, find_s, rng):
    """The same for runs that are simulated side by side."""
    slowdown = np.array([one.slowdown for one in kinds])
    scale = np.array([one.duration_s / math.gamma(1 + one.duration_power) for one in kinds])
    power = np.array([one.duration_power for one in kinds])
    number = len(rates)
    counts = rng.poisson(rates * horizon)
    run, kind = (np.repeat(at.ravel(), counts.ravel()) for at in np.indices(counts.shape))
    begins = rng.random(len(run)) * horizon
    lasts = scale[kind] * rng.exponential(size=len(run)) ** power[kind]

    # All beginnings and ends in turn, run after run; each run has one of no kind at its start.
    times = np.concatenate([np.zeros(number), begins, begins + np.minimum(lasts, find_s)])
    order = np.lexsort((times, runs := np.concatenate([np.arange(number), run, run])))
    times, runs = times[order], runs[order]
    change = np.repeat([0, 1, -1], [number, len(run), len(run)])[order]
    kind = np.concatenate([np.zeros(number, int), kind, kind])[order]
    factor = np.ones(len(times))
    for i, times_as_long in enumerate(slowdown):
        active = np.cumsum(change * (kind == i)) > 0
        factor = np.maximum(factor, np.where(active, times_as_long, 1.0))

    # Nothing is slow after the last end of a run, so sums may go on from one run to the next.
    delay = np.diff(times, append=times[-1]) * (1 - 1 / factor)
    delay = np.cumsum(delay) - delay
    first = np.flatnonzero(np.diff(runs, prepend=-1))
    delay -= delay[first][runs]
    done = times - delay
    last = first + np.bincount(runs[done <= work], minlength=number) - 1
    added = delay[last] + (work - done[last]) * (factor[last] - 1)
    found = (lasts > find_s) & (begins + find_s < work + added[run])
    return added, np.bincount(run[found], minlength=number)
