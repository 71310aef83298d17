"""Counts simulated steps into a law."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from .._padding import AnyArray
from ._errors import LEVELS, Errors
from ._histogram import histogram_of
from ._law import Law


# Sums are taken over so many steps in single precision, and over these in double precision.
_ROW = 256


class Counted(NamedTuple):
    """What a law keeps of the steps of a pool, on the host or a device.

    **Attributes:**

    - `times`: of the steps, ascending, in seconds; infinite where there are no more.
    - `centre`: the median, in seconds.
    - `sums`: over rows of steps, of deviations from the centre and of their squares.
    - `quantiles`: of the steps, at `LEVELS`.
    """

    times: Float[AnyArray, " steps"]
    centre: Float[AnyArray, ""]
    sums: Float[AnyArray, "2 rows"]
    quantiles: Float[AnyArray, " levels"]


def counted(times: Float[AnyArray, " steps"], number: int, xp: Any) -> Counted:
    """What a law keeps of the first `number` of some steps, whose times are in seconds.

    **Arguments:**

    - `xp`: `numpy` or `jax.numpy`, by which this is computed.
    """
    there = xp.arange(len(times)) < number
    times = xp.sort(xp.where(there, times, xp.inf))
    centre = times[number // 2]
    # In NumPy everything is in double precision.
    wide = times.astype(np.float64) if xp is np else times
    deviation = xp.where(there, wide - centre, 0)
    rows = xp.pad(deviation, (0, -len(times) % _ROW)).reshape(-1, _ROW)
    sums = xp.stack([xp.sum(rows, axis=1), xp.sum(rows**2, axis=1)])
    return Counted(times, centre, sums, _quantiles(times, number))


def _quantiles(times, number):
    """At `LEVELS`, of the first `number` of ascending times."""
    position = LEVELS * (number - 1)
    low = np.floor(position).astype(np.int32)
    share = (position - low).astype(times.dtype)
    high = np.minimum(low + 1, number - 1)
    return times[low] + share * (times[high] - times[low])


def law_of(part: Counted, number: int, errors: Errors, **fields: Any) -> Law:
    """The law of `number` steps.

    **Arguments:**

    - `errors`: of its figures.
    - `fields`: further ones of the law.
    """
    shift, square = np.sum(np.asarray(part.sums, np.float64), axis=1) / number
    return Law(
        mean=float(np.float64(part.centre) + shift),
        std=float(np.sqrt(max(square - shift**2, 0.0))),
        histogram=histogram_of(np.asarray(part.times)[:number]),
        errors=errors,
        **fields,
    )
