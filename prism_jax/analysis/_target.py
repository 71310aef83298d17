"""How much a part of a program may vary for a figure to meet a target."""

import dataclasses
import functools as ft
import math
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from .._estimate import Estimate
from .._progress import progress_bar
from ..engine import check_program, simulated_steps, vector_rule_notes
from ..program import Program
from ._bootstrap import MARGIN, check_num_steps, withheld
from ._check import check_objective, check_steps
from ._estimate import Figure, figure, figure_gradient, figure_value
from ._knobs import apply_knobs, check_parts, neutral, of_part, scaled, through_knobs
from ._objectives import AbstractObjective


# The tolerance of the search, and the largest factor that it tries.
_TOLERANCE = 1e-4
_WIDEST = 10.0


@dataclasses.dataclass(frozen=True)
class Target:
    """The result of `target`.

    **Attributes:**

    - `factor`: the factor on the spread of the part (for stalls, on their rate) with which the
        figure meets the target. Its standard error is `nan` where the figure does not change with
        it.
    - `reached`: the figure with this factor, in the unit of the objective.
    - `as_it_is`, `without`: the figure with a factor of one, and with a factor of zero.
    - `num_samples`: how many steps each figure is from.
    - `notes`: as in [`Sensitivity`][].
    """

    factor: Estimate
    reached: float
    as_it_is: float
    without: float
    num_samples: int
    notes: tuple[str, ...] = ()


def target(
    program: Program,
    objective: AbstractObjective,
    part: str,
    at: float,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    progress: bool = False,
) -> Target:
    """Finds how much a part may vary for a figure of the step time to meet a target.

    The factor on its spread is found by Brent's method with common random numbers. The standard
    error of the factor is that of the figure, divided by the derivative of the figure.

    **Arguments:**

    - `program`: the step.
    - `objective`: the figure.
    - `part`: the name of the part, as in `sensitivity`.
    - `at`: the target, that is, the value that the figure should have, in its unit.
    - `num_samples`: how many steps to simulate for each figure.
    - `key`: a `jax.random` key.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    A [`Target`][].

    **Raises:**

    `ValueError` if the program has no such part, or if the target is not met with any factor from
    zero to ten.
    """
    from scipy.optimize import brentq

    check_program(program, key)
    check_objective(objective)
    if not np.isfinite(at):
        raise ValueError(f"The target {at} must be a number, in the unit of {objective}.")
    ones = neutral(program)
    check_parts(ones, [part])
    check_steps(objective, num_samples)

    count = check_num_steps(num_samples)
    options: dict[str, Any] = {"num_samples": count, "key": key, "margin": MARGIN}
    base = simulated_steps(apply_knobs(program, ones), **options)

    def figure_at(factor: float) -> Figure:
        changed = apply_knobs(program, scaled(ones, {part: factor}))
        advance(1)
        return figure(changed, objective, like=base, **options)

    value = ft.cache(lambda factor: figure_at(factor).value)
    with progress_bar(None, progress, "search", "spread") as advance:
        without, as_it_is = value(0.0), value(1.0)
        low, high = 0.0, 1.0
        while value(high) < at and high < _WIDEST:
            low, high = high, min(2 * high, _WIDEST)
        if not without <= at <= value(high):
            top = value(high)
            end = f"{top:.7g} with {high:g} times as much" if at > top else f"{without:.7g} without"
            wanted = f"{objective} = {at:.7g} {objective.unit}"
            raise ValueError(
                f"No spread of `{part}` makes {wanted}: it is {as_it_is:.7g} now, and {end}."
            )
        factor: Any = brentq(lambda factor: value(factor) - at, low, high, xtol=_TOLERANCE)
        found = figure_at(factor)
    knobs = scaled(ones, {part: factor})
    slope = float(of_part(through_knobs(program, knobs, figure_gradient(found)), part))
    reached = figure_value(found)
    (there,) = reached.estimates()
    error = there.standard_error / abs(slope) if slope else math.nan
    return Target(
        factor=Estimate(factor, error, there.degrees),
        reached=found.value,
        as_it_is=as_it_is,
        without=without,
        num_samples=len(base.steps),
        notes=(
            *vector_rule_notes(found.simulated.run),
            *withheld(f"{objective}", float(reached.support[0])),
        ),
    )
