"""Where to spend on less variability."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._estimate import Estimate
from .._misc import bisect
from .._progress import progress_bar
from ..engine import check_program, simulated_steps, vector_rule_notes
from ..program import Program
from ._bootstrap import MARGIN, check_num_steps, combined, withheld
from ._check import check_objective, check_reached, check_steps
from ._estimate import figure, figure_gradient, figure_of, figure_value
from ._knobs import apply_knobs, check_parts, neutral, of_part, scaled, through_knobs
from ._objectives import AbstractObjective


# The search simulates one step for this many steps of the result.
_SEARCH = 4
# The search has converged when each share moves by less than this share of the budget.
_SETTLED = 1e-3


@dataclasses.dataclass(frozen=True)
class Improvement:
    """The result of `improve`. Figures are in the unit of the objective.

    **Attributes:**

    - `objective`, `unit`: the name of the figure, and its unit.
    - `removed`: for each part, the share of its spread (for stalls, of their rate) to remove.
    - `spent`: the cost of removing these shares.
    - `before`, `after`, `gain`: the figure before and after, and by how much it falls, from steps
        that the search did not use.
    - `path`: the figure in the course of the search, all from the same steps: with the budget spent
        evenly; with the budget spent on the parts that gain most for their cost, to first order;
        and after each iteration of the descent, which starts from the better of these two.
    - `num_samples`: how many steps each figure is from.
    - `notes`: as in [`Sensitivity`][].
    """

    objective: str
    unit: str
    removed: dict[str, float]
    spent: float
    before: Estimate
    after: Estimate
    gain: Estimate
    path: list[float]
    num_samples: int
    notes: tuple[str, ...] = ()

    def table(self) -> Any:
        """A polars frame with a row for each part, the largest share first."""
        import polars as pl

        frame = pl.DataFrame({"part": [*self.removed], "removed [1]": [*self.removed.values()]})
        return frame.sort("removed [1]", descending=True, maintain_order=True)


def improve(
    program: Program,
    objective: AbstractObjective,
    costs: Mapping[str, float],
    budget: float,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    num_iterations: int = 20,
    progress: bool = False,
) -> Improvement:
    """Finds how to spend a budget on removing variability, to lower a figure of the step time.

    Removing a share `x` of the spread of a part costs `x` times its cost. The shares are found by
    projected gradient descent with common random numbers.

    **Arguments:**

    - `program`: the step.
    - `objective`: the figure.
    - `costs`: for each part, named as in `sensitivity` (`gemm`, `rank`, `stalls of gemm`,
        `stage 3`), the cost of removing all of its spread, in any unit of money.
    - `budget`: how much may be spent, in the same unit.
    - `num_samples`: how many steps to simulate for each figure. The search uses a quarter as many.
    - `key`: a `jax.random` key.
    - `num_iterations`: the most iterations of the descent, which ends earlier if the shares
        converge.
    - `progress`: whether to show bars on stderr.

    **Returns:**

    An [`Improvement`][].

    **Raises:**

    `ValueError` if a name is not of a part of the program, or if a cost or the budget is not
    positive.
    """
    check_program(program, key)
    check_objective(objective)
    ones = neutral(program)
    check_parts(ones, costs)
    prices = np.array([*costs.values()], float)
    if not len(prices) or not (np.isfinite(prices) & (prices > 0)).all():
        raise ValueError("`costs` must hold a positive cost for each part that can be improved.")
    _check_search(budget, num_iterations)
    check_steps(objective, num_samples)
    count = check_num_steps(num_samples)
    of_search, of_report = jax.random.split(key)
    search: dict[str, Any] = {"num_samples": count // _SEARCH, "key": of_search}
    search["like"] = simulated_steps(apply_knobs(program, ones), **search)
    check_reached(objective, figure_of(search["like"], objective).value)

    def improved(removed):
        return scaled(ones, dict(zip(costs, 1 - removed, strict=True)))

    def value_and_gradient(removed):
        knobs = improved(removed)
        changed = apply_knobs(program, knobs)
        found = figure(changed, objective, **search)
        gradient = through_knobs(program, knobs, figure_gradient(found))
        advance(1)
        return found.value, np.array([-float(of_part(gradient, name)) for name in costs])

    with progress_bar(num_iterations + 2, progress, "descent", "iteration") as advance:
        removed, path = _descend(value_and_gradient, prices, budget, num_iterations)
    options: dict[str, Any] = {"num_samples": count, "key": of_report, "progress": progress}
    options["margin"] = MARGIN
    was = figure(apply_knobs(program, ones), objective, **options)
    now = figure(apply_knobs(program, improved(removed)), objective, like=was.simulated, **options)
    before, after = figure_value(was), figure_value(now)
    gain = combined(np.subtract, before, after)
    return Improvement(
        objective=str(objective),
        unit=objective.unit,
        removed=dict(zip(costs, removed.tolist(), strict=True)),
        spent=float(removed @ prices),
        before=before.estimates()[0],
        after=after.estimates()[0],
        gain=gain.estimates()[0],
        path=path,
        num_samples=count,
        notes=(
            *vector_rule_notes(now.simulated.run),
            *withheld(f"The gain of {objective}", float(gain.support[0])),
        ),
    )


def _check_search(budget: float, num_iterations: int) -> None:
    if not (np.isfinite(budget) and budget > 0):
        raise ValueError(f"The budget of {budget} must be positive.")
    if num_iterations < 1:
        raise ValueError(f"`num_iterations={num_iterations}` must be at least 1.")


def _descend(
    value_and_gradient, prices: np.ndarray, budget: float, num_iterations: int
) -> tuple[np.ndarray, list[float]]:
    """The best shares seen, and the value at each iteration.

    The variables are amounts of money, so a step moves money between parts by how much each gains
    for it.
    """
    even = prices * min(budget / prices.sum(), 1)
    value, gradient = value_and_gradient(even / prices)
    starts = [(value, gradient / prices, even)]
    # Where the figure is linear, this is the optimum.
    greedy = _greedy(gradient / prices, prices, budget)
    value, gradient = value_and_gradient(greedy / prices)
    starts.append((value, gradient / prices, greedy))
    path = [value for value, *_ in starts]
    value, gradient, spent = min(starts, key=lambda start: start[0])
    best = (value, spent)
    scale = float(np.abs(gradient).max()) or 1.0
    # Not an optimiser that scales each coordinate by itself: its projection would settle elsewhere.
    rate = 0.5 * min(budget, float(prices.max()))
    for i in range(num_iterations):
        decayed = rate * (1 + np.cos(np.pi * i / num_iterations)) / 2
        before, spent = spent, _affordable(spent - decayed * gradient / scale, prices, budget)
        if np.abs(spent - before).max() < _SETTLED * budget:
            break
        value, gradient = value_and_gradient(spent / prices)
        gradient = gradient / prices
        path.append(value)
        best = min(best, (value, spent), key=lambda one: one[0])
    return best[1] / prices, path


def _greedy(gradient: np.ndarray, prices: np.ndarray, budget: float) -> np.ndarray:
    """The budget spent on the parts that gain most for their cost."""
    order = np.argsort(gradient, kind="stable")
    before = np.cumsum(prices[order]) - prices[order]
    spent = np.empty_like(prices)
    spent[order] = np.clip(budget - before, 0, prices[order])
    return np.where(gradient < 0, spent, 0)


def _affordable(
    spent: Float[np.ndarray, " parts"], prices: Float[np.ndarray, " parts"], budget: float
) -> Float[np.ndarray, " parts"]:
    """The nearest way to spend up to the budget, on each part up to its price."""

    def less(by):
        return np.clip(spent - by, 0, prices)

    if less(0).sum() <= budget:
        return less(0)
    _, by = bisect(lambda by: less(by).sum() > budget, 0.0, float(np.max(spent)), 100)
    return less(by)
