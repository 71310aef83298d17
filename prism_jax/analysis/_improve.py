"""Where to spend on less variability, and how much of it a target allows."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .._estimate import Estimate
from .._installed import needed
from .._misc import bisect, plural
from .._progress import progress_bar
from .._summary import Column, Shown, Table
from ..engine import simulated_steps
from ..program import Program
from ._check import check_figure, check_reached
from ._derivative import figure_gradient
from ._descent import descend
from ._figure import Figure, figure, figure_of, figure_value
from ._jackknife import combined, stacked, withheld
from ._knobs import check_part_names, factor_slopes, varied
from ._objectives import AbstractObjective


# The search simulates one step for this many steps of the result.
_SEARCH = 4
# The search has converged when each share moves by less than this share of the budget.
_SETTLED = 1e-3
# The tolerance of the search for a target, and the largest factor that it tries.
_TOLERANCE = 1e-4
_WIDEST = 10.0


@dataclasses.dataclass(frozen=True, repr=False)
class Improvement(Shown):
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
        pl = needed("polars")
        frame = pl.DataFrame({"part": [*self.removed], "removed [1]": [*self.removed.values()]})
        return frame.sort("removed [1]", descending=True, maintain_order=True)

    def headline(self) -> str:
        unit = "" if self.unit == "1" else f" {self.unit}"
        return (
            f"as it is {self.before}{unit}, improved {self.after}{unit}, gain {self.gain}{unit}\n"
            f"{plural(self.num_samples, 'step')} for each figure, "
            f"{plural(len(self.path) - 2, 'iteration')}"
        )

    def summary(self) -> Table:
        columns = Column("part"), Column("share of its spread to remove", "share", ".3f")
        shares = sorted(self.removed.items(), key=lambda item: -item[1])
        rows = [{"part": name, "share": share} for name, share in shares]
        title = f"{self.objective}, with {self.spent:.4g} spent"
        return Table(columns, rows, title, self.notes)


def improve(
    program: Program,
    objective: AbstractObjective,
    costs: Mapping[str, float],
    budget: float,
    *,
    num_samples: int,
    key: "jax.Array",
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
    count = check_figure(program, objective, num_samples, key)
    check_part_names(program, costs)
    prices = np.array([*costs.values()], float)
    if not len(prices) or not (np.isfinite(prices) & (prices > 0)).all():
        raise ValueError("`costs` must hold a positive cost for each part that can be improved.")
    if not (np.isfinite(budget) and budget > 0):
        raise ValueError(f"The budget of {budget} must be positive.")
    if num_iterations < 1:
        raise ValueError(f"`num_iterations={num_iterations}` must be at least 1.")
    of_search, of_report = jax.random.split(key)
    search: dict[str, Any] = {"num_samples": count // _SEARCH, "key": of_search}
    search["like"] = simulated_steps(varied(program, {}), **search)
    check_reached(objective, figure_of(search["like"], objective).value)

    def left(removed: np.ndarray) -> dict[str, Any]:
        return dict(zip(costs, 1 - removed, strict=True))

    def value_and_gradient(removed: np.ndarray) -> tuple[float, np.ndarray]:
        result = figure(varied(program, left(removed)), objective, **search)
        slopes = factor_slopes(program, left(removed), figure_gradient(result))
        advance(1)
        return result.value, -slopes

    with progress_bar(num_iterations + 2, progress, "descent", "iteration") as advance:
        removed, path = _best_shares(value_and_gradient, prices, budget, num_iterations)
    options: dict[str, Any] = {"num_samples": count, "key": of_report}
    options["progress"] = progress
    was = figure(varied(program, {}), objective, **options)
    now = figure(varied(program, left(removed)), objective, like=was.simulated, **options)
    values = figure_value(was), figure_value(now)
    compared = stacked(*values, combined(np.subtract, *values))
    notes = withheld(f"The gain of {objective}", float(compared.support[2]))
    shares = dict(zip(costs, removed.tolist(), strict=True))
    before, after, gain = compared.estimates()
    plan = (str(objective), objective.unit, shares, float(removed @ prices))
    return Improvement(*plan, before, after, gain, path, count, notes)


def _best_shares(
    value_and_gradient: Callable[[np.ndarray], tuple[float, np.ndarray]],
    prices: np.ndarray,
    budget: float,
    num_iterations: int,
) -> tuple[np.ndarray, list[float]]:
    """The best shares seen, and the value at each iteration.

    The variables are amounts of money, so a step moves money between parts by how much each gains
    for it.
    """
    import optax

    @ft.cache
    def at(*spent: float) -> tuple[float, np.ndarray]:
        value, gradient = value_and_gradient(np.array(spent) / prices)
        return value, gradient / prices

    even = prices * min(budget / prices.sum(), 1)
    # Where the figure is linear, this is the optimum.
    greedy = _greedy(at(*even)[1], prices, budget)
    start = min(even, greedy, key=lambda spent: at(*spent)[0])
    scale = float(np.abs(at(*start)[1]).max()) or 1.0
    # Not an optimiser that scales each coordinate by itself: its projection would settle elsewhere.
    rate = 0.5 * min(budget, float(prices.max())) / scale
    path = descend(
        lambda spent, _: at(*spent),
        start,
        optax.sgd(optax.cosine_decay_schedule(rate, num_iterations)),
        num_iterations + 1,
        lambda spent: _affordable(spent, prices, budget),
        _SETTLED * budget,
    )
    points = [even, greedy, *path.points[1:]]
    values = [at(*spent)[0] for spent in points]
    return points[int(np.argmin(values))] / prices, values


def _greedy(gradient: np.ndarray, prices: np.ndarray, budget: float) -> np.ndarray:
    """The budget spent on the parts that gain most for their cost."""
    order = np.argsort(gradient, kind="stable")
    before = np.cumsum(prices[order]) - prices[order]
    spent = np.empty_like(prices)
    spent[order] = np.clip(budget - before, 0, prices[order])
    return np.where(gradient < 0, spent, 0)


def _affordable(spent: np.ndarray, prices: np.ndarray, budget: float) -> np.ndarray:
    """The nearest way to spend up to the budget, on each part up to its price."""

    def less(by):
        return np.clip(spent - by, 0, prices)

    if less(0).sum() <= budget:
        return less(0)
    _, by = bisect(lambda by: less(by).sum() > budget, 0.0, float(np.max(spent)), 100)
    return less(by)


@dataclasses.dataclass(frozen=True, repr=False)
class Target(Shown):
    """The result of `target`.

    **Attributes:**

    - `objective`, `unit`, `part`: the names of the figure and of the part, and the figure's unit.
    - `factor`: the factor on the spread of the part (for stalls, on their rate) with which the
        figure meets the target. Its standard error is `nan` where the figure does not change with
        it.
    - `reached`: the figure with this factor, in the unit of the objective.
    - `as_it_is`, `without`: the figure with a factor of one, and with a factor of zero.
    - `num_samples`: how many steps each figure is from.
    - `notes`: as in [`Sensitivity`][].
    """

    objective: str
    unit: str
    part: str
    factor: Estimate
    reached: float
    as_it_is: float
    without: float
    num_samples: int
    notes: tuple[str, ...] = ()

    def headline(self) -> str:
        answer = (
            f"with {self.factor} times its spread, `{self.part}` gives {self.objective} = "
            f"{self.reached:.6g}; with its present spread {self.as_it_is:.6g}, without any "
            f"{self.without:.6g} ({plural(self.num_samples, 'step')})"
        )
        return "\n".join([answer, *self.notes])


def target(
    program: Program,
    objective: AbstractObjective,
    part: str,
    at: float,
    *,
    num_samples: int,
    key: "jax.Array",
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

    if not np.isfinite(at):
        raise ValueError(f"The target {at} must be a number, in the unit of {objective}.")
    count = check_figure(program, objective, num_samples, key)
    check_part_names(program, [part])
    options: dict[str, Any] = {"num_samples": count, "key": key}
    base = simulated_steps(varied(program, {}), **options)

    def figure_at(factor: float) -> Figure:
        advance(1)
        return figure(varied(program, {part: factor}), objective, like=base, **options)

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
        at_target = figure_at(factor)
    (slope,) = factor_slopes(program, {part: factor}, figure_gradient(at_target)).tolist()
    reached = figure_value(at_target)
    (there,) = reached.estimates()
    error = there.standard_error / abs(slope) if slope else math.nan
    notes = withheld(f"{objective}", float(reached.support[0]))
    allowed = Estimate(factor, error, there.degrees)
    named = str(objective), objective.unit, part
    return Target(*named, allowed, at_target.value, as_it_is, without, count, notes)
