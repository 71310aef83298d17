"""How often runs are interrupted or slowed: uncertain counts, bad nodes, bad weeks, slow events."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ..data import Cause, Failures, Slow


WEEK = 7 * 86_400.0
# Weeks that differ; then they come again in the same order.
_WEEKS = 52
# A shape near zero makes most factors so small that they are zero as numbers.
_LEAST_FACTOR = 1e-9
# Each slow event takes some hundred bytes of each run.
_MOST_SLOW = 20_000
# Events of runs that are simulated side by side.
_EVENTS = 1e6
_OF_CAUSES = ("detection_s", "takes_node", "reallocates", "announced")


def check_failures(failures: Failures, known_costs: bool, find_slow_s: float | None) -> None:
    """Raises a `ValueError` unless runs can be drawn from what was counted."""
    if not failures.causes:
        raise ValueError("`failures` has no cause; give at least one, whose count may be 0.")
    weeks = failures.weeks
    if weeks is not None and weeks.shape * weeks.counted <= 1:
        raise ValueError(
            f"`failures.weeks` has `shape` = {weeks.shape:g} and `counted` = {weeks.counted:g}, so "
            "that nothing is known of an average week; give a product above 1, or leave `weeks` "
            "out."
        )
    if not known_costs and failures.blocking_s == 0:
        raise ValueError(
            "No interval between checkpoints is the best where one costs nothing "
            "(`failures.blocking_s` = 0); give an interval."
        )
    if find_slow_s is not None and not (failures.slow and 0 <= find_slow_s < math.inf):
        raise ValueError(
            f"`find_slow_s={find_slow_s}` must be finite, not negative, and `failures` must have "
            "`slow` events to find; give both, or leave `find_slow_s` out."
        )


def check_slow(work: float, failures: Failures, rates: np.ndarray) -> None:
    """Refuses slow events that are as many as no run has; each is held of each run."""
    most = work * max(kind.slowdown for kind in failures.slow) * rates.sum(axis=1).max()
    if most > _MOST_SLOW:
        raise ValueError(
            f"`failures.slow` has up to {most:.3g} events in a run, more than {_MOST_SLOW:,}; give "
            "fewer events or steps, or leave out those that are part of the law of a step."
        )


@dataclasses.dataclass(frozen=True)
class Hazards:
    """The causes that interrupt a run, with one entry per cause.

    **Attributes:**

    - `rates`: interruptions per second of the whole job, for each run, on average over weeks.
    - `detection_s`: the time until an interruption is noticed.
    - `takes_node`, `reallocates`, `announced`: as in `Cause`.
    - `num_spares`: the number of spare nodes; `None` if there is always one more.
    - `weeks`: the weighted seconds at the ends of weeks, as in `exposed`; `None` if all weeks are
        alike.
    """

    rates: Float[np.ndarray, "runs causes"]
    detection_s: Float[np.ndarray, "causes"]
    takes_node: np.ndarray
    reallocates: np.ndarray
    announced: np.ndarray
    num_spares: int | None
    weeks: Float[np.ndarray, "runs ends"] | None = None


def draw_hazards(
    failures: Failures,
    devices: int,
    number: int,
    rng: np.random.Generator,
    *,
    num_spares: int | None = None,
    known_rates: bool = False,
) -> Hazards:
    """The rates of the interruptions of so many runs, each on nodes and in weeks of its own.

    The mean of `n` factors of a gamma law of the shape `a` has a gamma law of the shape `n * a`: of
    a run's nodes, and of the weeks in which the interruptions were counted, by which the counts are
    too high or too low.

    **Arguments:**

    - `failures`: the counts, and how much nodes and weeks differ.
    - `devices`: the devices of a run.
    - `number`: how many runs to draw for.
    - `num_spares`, `known_rates`: as in `training_run`.
    """
    causes = failures.causes
    drawn = draw_counts(causes, number, rng, known_rates)
    weeks = None
    if failures.nodes is not None:
        nodes = max(devices / failures.nodes.devices, 1)
        drawn = drawn * _factors(failures.nodes.shape * nodes, (number, 1), rng)
    if failures.weeks is not None:
        if not known_rates:
            counted = failures.weeks.shape * failures.weeks.counted
            drawn = drawn / _factors(counted, (number, 1), rng)
        factors = _factors(failures.weeks.shape, (number, _WEEKS), rng)
        weeks = np.pad(np.cumsum(WEEK * factors, axis=1), ((0, 0), (1, 0)))
    rates = per_second(drawn, devices, failures)
    of = {name: np.array([getattr(cause, name) for cause in causes]) for name in _OF_CAUSES}
    return Hazards(rates, **of, num_spares=num_spares, weeks=weeks)


def per_second(counts: Any, devices: int, failures: Failures) -> Any:
    """The rates per second of a job on so many devices, from counts."""
    return counts * devices / (failures.device_hours * 3600)


def draw_counts(
    counted: Sequence[Cause | Slow], number: int, rng: np.random.Generator, known_rates: bool
) -> Float[np.ndarray, "runs kinds"]:
    """The expected counts given those counted, or those counted themselves. The prior is Jeffreys'
    for their total, of which each kind has the same part: however finely kinds are told apart, the
    total has the gamma law of its count.
    """
    counts = np.array([kind.count for kind in counted], float)
    size = (number, len(counts))
    if known_rates:
        return np.broadcast_to(counts, size)
    return rng.gamma(counts + 0.5 / len(counts), size=size)


def _factors(
    shape: float, size: tuple[int, int], rng: np.random.Generator
) -> Float[np.ndarray, "runs weeks"]:
    return np.maximum(rng.gamma(shape, 1 / shape, size), _LEAST_FACTOR)


def exposed(
    seconds: Float[np.ndarray, "runs"], weeks: Float[np.ndarray, "runs ends"]
) -> Float[np.ndarray, "runs"]:
    """The weighted seconds after so many seconds of each run.

    **Arguments:**

    - `weeks`: `weeks[:, i]` are the seconds of the first `i` weeks, each weighted by the factor of
        its week. After the last week the first begins again.
    """
    turns, week = np.divmod(seconds / WEEK, weeks.shape[1] - 1)
    before, after = _ends(weeks, week.astype(int))
    return turns * weeks[:, -1] + before + (week % 1) * (after - before)


def reached(
    weighted: Float[np.ndarray, "runs"], weeks: Float[np.ndarray, "runs ends"]
) -> Float[np.ndarray, "runs"]:
    """After how many seconds each run has so many weighted ones: the inverse of `exposed`."""
    turns, within = np.divmod(weighted, weeks[:, -1])
    week = (weeks[:, 1:-1] <= within[:, None]).sum(axis=1)
    before, after = _ends(weeks, week)
    return WEEK * (turns * (weeks.shape[1] - 1) + week + (within - before) / (after - before))


def _ends(weeks, week):
    runs = np.arange(len(weeks))
    return weeks[runs, week], weeks[runs, week + 1]


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
    parts = [_slowed(work, horizon, kinds, group, find_s, rng) for group in groups]
    added, number = map(np.concatenate, zip(*parts, strict=True))
    return added, number


def _slowed(work, horizon, kinds, rates, find_s, rng):
    """The same for runs that are simulated side by side."""
    slowdown = np.array([event.slowdown for event in kinds])
    scale = np.array([event.duration_s / math.gamma(1 + event.duration_power) for event in kinds])
    power = np.array([event.duration_power for event in kinds])
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
    seen = (lasts > find_s) & (begins + find_s < work + added[run])
    return added, np.bincount(run[seen], minlength=number)
