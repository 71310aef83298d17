"""The derivatives of a run's mean length, in days, in the logarithms of rates and costs."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from .._estimate import Estimate
from ._cycles import RunCosts, Runs
from ._run_law import DAY


# Of a central difference in the logarithm of a cost, and the runs that it is taken of.
_APART = 0.1
_DIFFERENCE_RUNS = 16_384


def of_rates(
    runs: Runs, rates: Float[np.ndarray, "runs causes"], names: Sequence[str]
) -> dict[str, Estimate]:
    """By the score of the law of the interruptions, which are a Poisson process over the seconds of
    a run, each weighted by the factor of its week.
    """
    seconds = runs.parts.sum(axis=1)
    score = runs.interruptions - rates * runs.exposed[:, None]
    centred = (seconds - seconds.mean()) / DAY
    return {
        f"rate of {name}": mean_of(centred * score[:, i])
        for i, name in enumerate(names)
        if rates[:, i].any()
    }


def of_costs(
    simulate: Callable[[RunCosts, int], Runs], costs: RunCosts, num_runs: int
) -> dict[str, Estimate]:
    """By central differences: `simulate` has the same random numbers for all costs."""
    number, found = min(num_runs, _DIFFERENCE_RUNS), {}
    for name, moved in _moved(costs).items():
        less, more = (simulate(c, number).parts.sum(axis=1) for c in moved)
        found[name] = mean_of((more - less) / (2 * _APART) / DAY)
    return found


def _moved(costs: RunCosts) -> dict[str, tuple[RunCosts, RunCosts]]:
    """The costs with each that is not zero a little lower, and higher."""
    found = {}
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if value > 0:
            less, more = (value * math.exp(apart) for apart in (-_APART, _APART))
            found[field.name] = (
                dataclasses.replace(costs, **{field.name: less}),
                dataclasses.replace(costs, **{field.name: more}),
            )
    return found


def mean_of(values: np.ndarray) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))
