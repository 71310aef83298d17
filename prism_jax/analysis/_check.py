"""What analyses refuse."""

import math
from typing import Any

from .._misc import counted
from ..engine import check_num_samples
from ._objectives import AbstractObjective


def check_objective(objective: Any) -> None:
    """Raises a `ValueError` unless `objective` is an objective."""
    if not isinstance(objective, AbstractObjective):
        raise ValueError(
            f"The objective {objective!r} must be an `AbstractObjective`, such as `Mean()` or "
            "`Quantile(0.95)`."
        )


def check_reached(objective: AbstractObjective, value: float) -> None:
    """Raises a `ValueError` where a probability is zero or one: its derivative would be zero."""
    if objective.exceeds is not None and not 0 < value < 1:
        raise ValueError(
            f"{objective} is {value:g}; give a threshold that some steps exceed and others do not."
        )


# With fewer steps than this beyond a quantile, its estimate is biased inwards.
_FEWEST_BEYOND = 3


def check_steps(objective: AbstractObjective, num_samples: int) -> None:
    """Raises a `ValueError` if there are too few steps to estimate the figure."""
    each = check_num_samples(num_samples)
    share = objective.share
    if share < 1 and share * each < _FEWEST_BEYOND:
        raise ValueError(
            f"{counted(num_samples, 'step')} do{'es' * (num_samples == 1)} not reach as far as "
            f"{objective}; simulate at least {math.ceil(_FEWEST_BEYOND / share):,}."
        )
