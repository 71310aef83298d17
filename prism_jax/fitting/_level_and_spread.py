"""The level and the spread at which predicted steps agree with measured ones."""

from collections.abc import Callable

import numpy as np

from ._bisect import bisect
from ._observe import Observed, core_spread
from ._values import WILDEST, Values, with_values


# A level further off than this factor is a mistake in the job or in the unit.
_FURTHEST = 10.0
_HALVINGS = 9

Steps = Callable[[Values], np.ndarray]


def solve_level(median: Callable[[float], float], wanted: float, known: float = 1.0) -> float:
    """The level of compute at which a step has the median that is wanted, by secants.

    **Raises:**

    `ValueError` where the level is beyond belief.
    """
    before, of_before, first = 0.0, 0.0, None
    for _ in range(10):
        found = median(known)
        first = found if first is None else first
        if abs(found / wanted - 1) < 1e-4 or found == of_before:
            break
        slope = (found - of_before) / (known - before)
        before, of_before, known = known, found, known + (wanted - found) / slope
        if not 1 / _FURTHEST < known < _FURTHEST:
            raise ValueError(
                f"The measured median of {wanted:.4g} s is too far from the job's {first:.4g} s: "
                f"no factor of up to {_FURTHEST:g} on compute explains it; check the unit of the "
                "step times, and the job."
            )
    return known


def with_level(value: Values, observed: Observed, steps: Steps) -> Values:
    """The values with which the medians agree; `steps` gives quantiles of the steps of values."""

    def median(level: float) -> float:
        return float(np.median(steps(with_values(value, level=level))))

    return with_values(value, level=solve_level(median, observed.median, float(value.level)))


def with_spread(value: Values, observed: Observed, steps: Steps) -> Values:
    """The values with which the cores are as wide; see `with_level`."""

    def too_wide(**changes: float) -> float:
        return core_spread(steps(with_values(value, **changes))) / observed.core - 1

    if too_wide(spread=0.0) > 0:
        value = with_values(value, spread=0.0)
        others = bisect(lambda x: too_wide(others=x) > 0, 0.0, 1.0, _HALVINGS)
        return with_values(value, others=others)
    missing = too_wide(spread=WILDEST)
    if missing > 0:
        spread = bisect(lambda x: too_wide(spread=x) > 0, 0.0, WILDEST, _HALVINGS)
        return with_values(value, spread=spread)
    value = with_values(value, spread=WILDEST)
    own = (1 + missing) ** 2 - (float(value.step) / observed.core) ** 2
    step = observed.core * float(np.sqrt(max(1 - own, 0.0)))
    return with_values(value, step=max(step, float(value.step)))
