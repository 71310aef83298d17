"""How widely a part of a program may vary."""

import dataclasses
import math

import numpy as np
from jaxtyping import PRNGKeyArray

from .._estimate import Estimate
from .._misc import bisect
from .._progress import progress_bar
from ..engine import check_program, prepare, vector_rule_notes
from ..program import Program
from ._batches import NUM_BATCHES, in_batches
from ._estimate import figure, figure_gradient
from ._knobs import check_parts, neutral, of_part, scaled, through_knobs, turn
from ._objectives import AbstractObjective, check_objective, check_steps


# The search stops at such a width, and does not go beyond such a factor.
_TOLERANCE = 1e-4
_WIDEST = 10.0


@dataclasses.dataclass(frozen=True)
class Target:
    """What `target` found.

    **Attributes:**

    - `factor`: on the spread of the part (of stalls, on their rate), at which the figure is
        `reached`. Its standard error is not known where the figure does not depend on it there.
    - `reached`: the figure there, in the unit of the objective.
    - `as_it_is`, `without`: the figure with a factor of one, and of zero.
    - `num_samples`: steps behind each figure.
    - `notes`: what is to be said of the figures: where the vector rule of replicas, which they
        follow, is low.
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
    """How widely a part may vary for a figure of the step time to meet a target.

    By bisection with common random numbers. The standard error is that of the figure over its
    derivative.

    **Arguments:**

    - `program`: the step.
    - `objective`: the figure.
    - `part`: named as in `sensitivity`.
    - `at`: the target: what the figure should be, in its unit.
    - `num_samples`: how many steps for each figure.
    - `key`: a `jax.random` key.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    A [`Target`][].

    **Raises:**

    `ValueError` for a part that the program does not have, or a target that no spread of it below
    the tenfold meets.
    """
    check_program(program, key)
    check_objective(objective)
    if not np.isfinite(at):
        raise ValueError(f"The target {at} must be a number, in the unit of {objective!r}.")
    ones = neutral(program)
    check_parts(ones, [part])
    check_steps(objective, num_samples, NUM_BATCHES)

    def value(factor: float) -> float:
        changed = turn(program, scaled(ones, {part: factor}))
        found = figure(changed, objective, num_samples=num_samples, key=key)[0]
        advance(1)
        return found

    with progress_bar(None, progress, "search", "spread") as advance:
        without, as_it_is = value(0.0), value(1.0)
        low, high, top = 0.0, 1.0, as_it_is
        while top < at and high < _WIDEST:
            low, high = high, min(2 * high, _WIDEST)
            top = value(high)
        if not without <= at <= top:
            end = f"{top:.7g} with {high:g} times as much" if at > top else f"{without:.7g} without"
            raise ValueError(
                f"No spread of `{part}` makes {objective!r} = {at:.7g} {objective.unit}: it is "
                f"{as_it_is:.7g} as it is, and {end}."
            )
        num_halvings = math.ceil(math.log2((high - low) / _TOLERANCE))
        low, high = bisect(lambda factor: value(factor) < at, low, high, num_halvings)
        factor = (low + high) / 2
        reached = value(factor)
    knobs = scaled(ones, {part: factor})
    changed = turn(program, knobs)

    def both(count, key):
        found, composed, how = figure(changed, objective, num_samples=count, key=key)
        gradient = through_knobs(program, knobs, figure_gradient(composed, how))
        return np.array([found, float(of_part(gradient, part))])

    found = in_batches(both, num_samples=num_samples, key=key, progress=progress, what="error")
    figure_there, slope = found.estimates()
    error = figure_there.standard_error / abs(slope.value) if slope.value else math.nan
    spread = Estimate(factor, error, figure_there.degrees)
    notes = vector_rule_notes(prepare(changed, key))
    return Target(spread, reached, as_it_is, without, num_samples, notes)
