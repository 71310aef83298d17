"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

import itertools as it
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..engine import (
    Composed,
    Weighting,
    composed_steps,
    given_the_rest,
    last_draw,
    pull_back,
    support,
)
from ..program import Program
from ..step import Over
from ._bootstrap import Bootstrapped, bootstrapped, resampled_steps
from ._density import bandwidth
from ._objectives import AbstractObjective, Mean, check_objective


def estimate(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    progress: bool = False,
) -> Float[Array, ""]:
    """Estimates a figure of the law of the step time.

    Works under `eqx.filter_grad` and `eqx.filter_value_and_grad` with respect to `program`. One
    backward pass, which runs the same samples again, gives the derivatives with respect to every
    mean, spread, factor and stall rate. `estimate` runs a loop on the host, so it does not work
    under `jax.jit` or `jax.vmap`; use the pure function `sample_replica_ends` there. Replicas
    follow the vector rule, even where `simulate` uses the exact rule.

    **Arguments:**

    - `program`: the step.
    - `objective`: which figure, such as `Mean()`, `Quantile(q)` or `Exceedance(t)`.
    - `num_samples`: how many steps to simulate.
    - `key`: a `jax.random` key. The same key gives common random numbers.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    The figure, a scalar in seconds (a probability for `Exceedance`).
    """
    check_objective(objective)
    return _estimate(program, (objective, num_samples, key, progress))


class Figure(NamedTuple):
    """A figure, the steps (or probabilities) that it was computed from, and the objective that
    computes it from these.
    """

    value: float
    composed: Composed
    objective: AbstractObjective


def figure(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    like: Composed | None = None,
    margin: int = 1,
    progress: bool = False,
) -> Figure:
    """A figure with the steps behind it. See `composed_steps` for `like` and `margin`."""
    options: dict[str, Any] = {"key": key, "like": like, "margin": margin, "progress": progress}
    return figure_of(composed_steps(program, num_samples=num_samples, **options), objective)


def figure_of(composed: Composed, objective: AbstractObjective) -> Figure:
    """`figure`, from steps that are already composed."""
    if objective.exceeds is not None and (last := last_draw(composed, _width(composed))):
        composed, objective = given_the_rest(composed, objective.exceeds, last), Mean()
    return Figure(objective.value(composed.steps), composed, objective)


def figure_value(found: Figure) -> Bootstrapped:
    """The figure alone in a row."""
    return bootstrapped(found.composed, [found.objective])


def figure_gradient(found: Figure) -> Program:
    """The derivative of a figure with respect to the parameters of its program."""
    (gradient,) = pull_back(found.composed, [dependence(found)(None)])
    return gradient


def gradients(found: Figure) -> tuple[list[Program], float]:
    """The derivative of a figure, then the same with new weights of the replica samples, several
    times; and how many independent samples it rests on.
    """
    weighting = dependence(found)
    again = (
        weighting(those)._replace(resampled=decisions)
        for those, decisions in resampled_steps(found.composed)
    )
    every = weighting(None)
    return pull_back(found.composed, it.chain([every], again)), weighting.support()


def dependence(found: Figure) -> "_Smoothed | _Conditional":
    """How the figure depends on steps."""
    _, composed, objective = found
    width = _width(composed)
    last = None if objective.level is None else last_draw(composed, width)
    conditional = last and _conditional(composed, objective, width, last)
    return conditional or _Smoothed(composed, objective, width)


class _Smoothed(NamedTuple):
    """By the derivative of the figure with respect to each step, smoothed over `width` seconds."""

    composed: Composed
    objective: AbstractObjective
    width: float

    def __call__(self, those: np.ndarray | None) -> Weighting:
        """For all steps, or for resampled ones, whose numbers are given."""
        steps, number = self.composed.steps, len(self.composed.steps)
        some = steps if those is None else steps[those]
        slope = self.objective.slope(some, self.width)
        influence = self.objective.influence(some, self.width) / number
        if those is not None:
            slope, influence = (np.bincount(those, x, number) for x in (slope, influence))
        return Weighting(slope, influence)

    def support(self) -> float:
        """How many independent replica samples the derivative rests on."""
        return support(self.composed, np.abs(self(None).slope))


class _Conditional(NamedTuple):
    """A quantile, by the probability that each step takes longer, given all its draws but `last`.
    The probabilities `longer` are those at `at - gap`, `at` and `at + gap`, which resampled
    quantiles are near.
    """

    composed: Composed
    objective: AbstractObjective
    last: str
    at: float
    gap: float
    longer: Sequence[np.ndarray]

    def __call__(self, those: np.ndarray | None) -> Weighting:
        """For all steps, or for resampled ones, whose numbers are given."""
        steps, number = self.composed.steps, len(self.composed.steps)
        at, counts = self.at, np.ones(number)
        if those is not None:
            at = self.objective.value(steps[those])
            counts = np.bincount(those, minlength=number).astype(float)
        below, here, above = self.longer
        lower, upper = (float(counts @ x) / self.gap for x in (below - here, here - above))
        away = float(np.clip((at - self.at) / self.gap, -2, 2))
        density = (lower + upper) / 2
        if lower > 0 and upper > 0:  # Its logarithm is linear, so that it stays positive.
            density = np.sqrt(lower * upper) * (upper / lower) ** away
        longer = here + away * (above - below) / 2
        slope = counts / density
        over = Over(jnp.asarray(at, self.composed.run.plan.dtype), self.last)
        return Weighting(slope, slope * (longer - counts @ longer / number), over)

    def support(self) -> float:
        """How many independent replica samples the derivative rests on."""
        below, _, above = self.longer
        return support(self.composed, below - above)


def _conditional(
    composed: Composed, objective: AbstractObjective, width: float, last: str
) -> _Conditional | None:
    """`None` if no step can end near the quantile, whatever its last draw."""
    at, steps = objective.value(composed.steps), composed.steps
    apart = [objective.value(steps[those]) for those, _ in resampled_steps(composed)]
    gap = max(width / 4, float(np.std(apart)))
    near = [given_the_rest(composed, at + by * gap, last).steps for by in (-1, 0, 1)]
    if near[0].sum() <= near[2].sum():
        return None
    return _Conditional(composed, objective, last, at, gap, near)


def _width(composed: Composed) -> float:
    """The bandwidth for smoothing over steps: few replica samples may decide many of them."""
    return bandwidth(composed.steps, support(composed, np.ones(len(composed.steps))))


@eqx.filter_custom_vjp
def _estimate(program, arguments):
    return _value(program, arguments)[0]


def _value(program, arguments):
    objective, num_samples, key, progress = arguments
    options: dict[str, Any] = {"num_samples": num_samples, "key": key, "progress": progress}
    found = figure(program, objective, **options)
    return jnp.asarray(found.value, program.latencies.mean.dtype), found


@_estimate.def_fwd
def _forward(perturbed, program, arguments):
    del perturbed
    return _value(program, arguments)


@_estimate.def_bwd
def _backward(found, cotangent, perturbed, program, arguments):
    gradient = figure_gradient(found)
    return jax.tree.map(
        lambda g: None if g is None else g * cotangent, gradient, is_leaf=lambda g: g is None
    )
