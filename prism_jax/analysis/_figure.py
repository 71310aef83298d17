"""Figures of simulated steps, and how they depend on these."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from ..engine import (
    SimulatedSteps,
    conditional_exceedances,
    last_draw,
    simulated_steps,
    support,
)
from ..program import Program
from ._jackknife import Jackknifed, jackknifed
from ._objectives import AbstractObjective, Mean, bandwidth


class Figure(NamedTuple):
    """A figure, the steps (or probabilities) that it was computed from, and the objective that
    computes it from these.
    """

    value: float
    simulated: SimulatedSteps
    objective: AbstractObjective


def figure(program: Program, objective: AbstractObjective, **options: Any) -> Figure:
    """A figure with the steps behind it. The options are those of `simulated_steps`."""
    return figure_of(simulated_steps(program, **options), objective)


def figure_of(simulated: SimulatedSteps, objective: AbstractObjective) -> Figure:
    """`figure`, from steps that are already simulated."""
    at, width = objective.exceeds, _width(simulated, objective)
    if at is not None and (last := last_draw(simulated, at, width)):
        simulated, objective = conditional_exceedances(simulated, at, last), Mean()
    return Figure(objective.value(simulated.steps), simulated, objective)


def figure_value(figure: Figure) -> Jackknifed:
    """The figure alone in a row."""
    return jackknifed(figure.simulated, [figure.objective])


class Dependence(NamedTuple):
    """How a figure depends on steps.

    **Attributes:**

    - `simulated`: the steps, or probabilities given a threshold.
    - `objective`, `width`: the figure of these, and over how many seconds it is smoothed.
    - `unit`: of the derivatives; single precision does not hold what is per second of any.
    - `slope`: the derivative with respect to each step.
    - `influence`: the derivative with respect to the weight of each step.
    - `lost`: the same less what it is without the sample that decides the step.
    """

    simulated: SimulatedSteps
    objective: AbstractObjective
    width: float
    unit: float
    slope: Float[np.ndarray, " n"]
    influence: Float[np.ndarray, " n"]
    lost: Float[np.ndarray, " n"]

    def matters(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """By how much steps may move: times do, but probabilities of zero and one do not."""
        return np.ones(len(steps)) if self.simulated.exceedance is None else steps * (1 - steps)

    def relevance(self) -> Float[np.ndarray, " n"]:
        """How much each step matters."""
        return np.abs(self.slope) * self.matters(self.simulated.steps)


def dependence_of(figure: Figure, value: float) -> Dependence:
    """How a figure depends on steps; or, of a quantile of some value, how the probability that a
    step takes longer does, given all draws but the last, if this moves steps near the quantile.
    """
    _, simulated, objective = figure
    width, unit = _width(simulated, objective), 1.0
    if objective.level is not None and (last := last_draw(simulated, value, width)):
        longer = conditional_exceedances(simulated, value, last)
        if np.any(longer.steps * (1 - longer.steps)):
            simulated, objective, unit = longer, Mean(), 2.0 ** np.frexp(value)[1]
    ordered = np.sort(simulated.steps)
    # Steps of equal time share what the figure has of them.
    slopes = unit * objective.slope(ordered, width)
    influences = unit * objective.influence(ordered, width) / len(ordered)
    slope, influence = (np.interp(simulated.steps, ordered, x) for x in (slopes, influences))
    lost = influence - np.interp(simulated.without, ordered, influences)
    lost = np.where(np.isnan(lost), influence, lost)  # Of one replica there is no other.
    return Dependence(simulated, objective, width, unit, slope, influence, lost)


def _width(simulated: SimulatedSteps, objective: AbstractObjective) -> float:
    """The bandwidth for smoothing over steps: few replica samples may decide many of them."""
    number = support(simulated, np.ones(len(simulated.steps)))
    return bandwidth(simulated.steps, objective, number)
