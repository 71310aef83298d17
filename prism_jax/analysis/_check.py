"""What analyses of figures refuse, as they could not tell their standard errors."""

import math
from typing import Any

from .._misc import plural
from ..engine import check_num_samples, check_program
from ._objectives import AbstractObjective


_FEWEST_STEPS = 32
# With fewer steps than this beyond a quantile, its estimate is biased inwards.
_FEWEST_BEYOND = 3


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


def check_steps(objective: AbstractObjective, num_samples: int) -> None:
    """Raises a `ValueError` if there are too few steps to estimate the figure."""
    count = check_num_samples(num_samples)
    share = objective.share
    if share < 1 and share * count < _FEWEST_BEYOND:
        do = "does" if num_samples == 1 else "do"
        raise ValueError(
            f"{plural(num_samples, 'step')} {do} not reach as far as "
            f"{objective}; simulate at least {math.ceil(_FEWEST_BEYOND / share):,}."
        )


def check_figure(program: Any, objective: Any, num_samples: Any, key: Any) -> int:
    """`num_samples` as an `int`. Raises a `ValueError` unless a figure of simulated steps of a
    program can be had from so many, with its standard error.
    """
    check_program(program, key)
    check_objective(objective)
    check_steps(objective, num_samples)
    return check_num_steps(num_samples)


def check_num_steps(num_samples: int) -> int:
    """`num_samples` as an `int`.

    **Raises:**

    `ValueError` for too few steps.
    """
    num_samples = check_num_samples(num_samples)
    if num_samples < _FEWEST_STEPS:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {_FEWEST_STEPS} for standard errors."
        )
    return num_samples
