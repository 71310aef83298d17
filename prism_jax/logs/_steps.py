"""Which measured steps count: not those that compile, evaluate or save."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from ._series import Series


# At the start, steps longer than the typical one by this many robust deviations, and by this share.
_START_DEVIATIONS, _START_SHARE = 6.0, 0.05
# At most this share of a run, and so many steps, is its start; but one step always may be. What is
# longer is drift.
_MOST_START = 0.25, 50
# A robust deviation is at least this share of the typical step: logs are rounded.
_LEAST_DEVIATION = 0.002
_DEVIATIONS = 3.0
# Evaluations and checkpoints come every so many steps; a loader stalls by its number of workers.
_PERIODS = (20, 25, 50, 100, 125, 200, 250, 500, 1000, 2000, 2500, 5000, 10000)
_LEAST_TIMES = 3

Kept = Bool[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Steps that are not counted.

    **Attributes:**

    - `kind`: `start`, `checkpoint`, `evaluation`, or `periodic`.
    - `count`: how many.
    """

    kind: str
    count: int


def counted_steps(
    times: Float[np.ndarray, " steps"], series: Series, run: Int[np.ndarray, " steps"]
) -> tuple[Kept, list[LeftOut]]:
    """Which step times of a run count, and how many of which kind do not.

    A step is left out if it is at the start and longer than those after it, as one that compiles
    is; if a pause with a name was written before it; or if it is longer by three robust deviations
    every so many steps, at round numbers. Single long steps, bursts and drift stay.

    **Arguments:**

    - `times`: of the run, in seconds, `(steps,)`.
    - `series`: what was written.
    - `run`: where the run's values are in the series, `(steps,)`.
    """
    later = times[len(times) // 2 :]
    typical = float(np.median(later))
    deviation = 1.4826 * float(np.median(np.abs(later - typical)))
    deviation = max(deviation, _LEAST_DEVIATION * typical)
    reasons = {"start": _start(times, typical, deviation)}
    reasons |= {kind: before[run] for kind, before in series.pauses.items()}
    reasons["periodic"] = _periodic(series.steps[run], times, typical, _DEVIATIONS * deviation)
    kept, left_out = np.ones(len(times), bool), []
    for kind, away in reasons.items():
        if count := int(np.sum(kept & away)):
            left_out.append(LeftOut(kind, count))
        kept &= ~away
    return kept, left_out


def _start(times: np.ndarray, typical: float, deviation: float) -> np.ndarray:
    """The steps at the start that are longer than what follows, if these are few."""
    longest = typical + max(_START_DEVIATIONS * deviation, _START_SHARE * typical)
    number = int(np.argmin([*(times > longest), False]))
    share, most = _MOST_START
    return np.arange(len(times)) < (
        number if number <= min(max(share * len(times), 1), most) else 0
    )


def _periodic(steps: np.ndarray, times: np.ndarray, typical: float, least: float) -> np.ndarray:
    """The long steps at, or just after, the multiples of a round number, if all these are long, and
    longer than those at the multiples of a divisor, if these are all long, too: when every fourth
    step waits for a loader, every twentieth does.
    """
    periodic, long = np.zeros(len(steps), bool), times > typical + least
    for period in _PERIODS:
        for after in (0, 1):
            at = steps % period == after
            if np.sum(at) < _LEAST_TIMES or not np.all(long[at]):
                continue
            usual = typical
            for workers in range(2, _PERIODS[0]):
                of_workers = (steps % workers == after % workers) & ~at
                if period % workers == 0 and np.all(long[of_workers]):
                    usual = float(np.median(times[of_workers]))
            if np.median(times[at]) > usual + least:
                periodic |= at
    return periodic
