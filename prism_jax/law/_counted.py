"""Counts simulated steps into a law, in memory that does not grow with their number."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from .._padding import AnyArray
from ._errors import LEVELS, Errors
from ._histogram import NUM_BINS, NUM_EXTREMES, Histogram
from ._law import Law


# Sums are taken over so many steps in single precision, and over these in double precision.
_ROW = 256


class Counted(NamedTuple):
    """What a law keeps of the steps of a pool, on the host or a device.

    **Attributes:**

    - `counts`: the steps below the grid, in each bin, and above the grid.
    - `smallest`, `largest`: the shortest and the longest steps, ascending.
    - `centre`: the median, in seconds.
    - `sums`: over rows of steps, of deviations from the centre and of their squares.
    - `quantiles`: of the steps, at `LEVELS`.
    """

    counts: Int[AnyArray, " bins+2"]
    smallest: Float[AnyArray, " shortest"]
    largest: Float[AnyArray, " longest"]
    centre: Float[AnyArray, ""]
    sums: Float[AnyArray, "2 rows"]
    quantiles: Float[AnyArray, " levels"]


def grid_of(pilot: np.ndarray) -> tuple[float, float]:
    """The two ends of the grid of bins, far beyond what the pilot saw."""
    low, middle, high = np.quantile(pilot, [0.01, 0.5, 0.99]).tolist()
    spread = max((high - low) / 4.65, 1e-9 * abs(middle)) or 1e-15
    smallest, largest = float(pilot.min()), float(pilot.max())
    return (
        max(min(middle - 30 * spread, 2 * smallest - middle), 0.0),
        max(middle + 50 * spread, 2 * largest - middle),
    )


def counted(
    times: Float[AnyArray, " steps"], number: int, grid: tuple[float, float], xp: Any
) -> Counted:
    """What a law keeps of the first `number` of some steps, whose times are in seconds.

    **Arguments:**

    - `grid`: the two ends of the grid of bins.
    - `xp`: `numpy` or `jax.numpy`, by which this is computed.
    """
    there = xp.arange(len(times)) < number
    times = xp.sort(xp.where(there, times, xp.inf))
    edges = xp.asarray(np.linspace(*grid, NUM_BINS + 1).astype(times.dtype))
    below = xp.searchsorted(times, edges)
    ends = xp.asarray([0, number], below.dtype)
    counts = xp.diff(below, prepend=ends[:1], append=ends[1:])
    most = min(NUM_EXTREMES, len(times))
    centre = times[number // 2]
    # In NumPy everything is in double precision.
    wide = times.astype(np.float64) if xp is np else times
    deviation = xp.where(there, wide - centre, 0)
    rows = xp.pad(deviation, (0, -len(times) % _ROW)).reshape(-1, _ROW)
    return Counted(
        counts,
        times[:most],
        times[xp.clip(number - most + xp.arange(most), 0, None)],
        centre,
        xp.stack([xp.sum(rows, axis=1), xp.sum(rows**2, axis=1)]),
        _quantiles(times, number),
    )


def _quantiles(times, number):
    """At `LEVELS`, of the first `number` of ascending times."""
    position = LEVELS * (number - 1)
    low = np.floor(position).astype(np.int32)
    share = (position - low).astype(times.dtype)
    high = np.minimum(low + 1, number - 1)
    return times[low] + share * (times[high] - times[low])


def law_of(
    part: Counted, number: int, grid: tuple[float, float], errors: Errors, **fields: Any
) -> Law:
    """The law of `number` steps.

    **Arguments:**

    - `errors`: of its figures.
    - `fields`: further ones of the law.
    """
    most = min(number, NUM_EXTREMES)
    shift, square = np.sum(np.asarray(part.sums, np.float64), axis=1) / number
    return Law(
        mean=float(np.float64(part.centre) + shift),
        std=float(np.sqrt(max(square - shift**2, 0.0))),
        histogram=Histogram(
            grid,
            np.asarray(part.counts, np.int64),
            np.asarray(part.smallest, np.float64)[:most],
            np.asarray(part.largest, np.float64)[-most:],
        ),
        errors=errors,
        **fields,
    )
