"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters; and
`step_times`, the steps themselves.
"""

import functools as ft
import itertools as it
from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._misc import whole_number
from ..engine import (
    Again,
    SimulatedSteps,
    Weighting,
    conditional_exceedances,
    last_draw,
    pull_back,
    resample,
    simulated_steps,
    step_parts_of,
    support,
)
from ..program import Program
from ..step import StepParts
from ._bootstrap import Bootstrapped, bootstrapped, check_objective, evenly, in_order
from ._objectives import AbstractObjective, Mean, bandwidth


def estimate(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: "jax.Array",
    progress: bool = False,
) -> Float[Array, ""]:
    """Estimates a figure of the law of the step time.

    Works under `eqx.filter_grad` and `eqx.filter_value_and_grad` with respect to `program`. One
    backward pass, which runs the same samples again, gives the derivatives with respect to every
    mean, spread, factor and stall rate. `estimate` runs a loop on the host, so it does not work
    under `jax.jit` or `jax.vmap`; use the pure function `sample_replica_ends` there. Replicas
    follow the vector rule, by which the slowest replica alone decides a step.

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
    # To a custom derivative a number of NumPy is an array.
    number = whole_number(num_samples, "num_samples")
    return _estimate(program, objective, {"num_samples": number, "key": key, "progress": progress})


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
        given = step_parts_of(simulated), at, last
        simulated, objective = conditional_exceedances(simulated, *given), Mean()
    return Figure(objective.value(simulated.steps), simulated, objective)


def figure_value(found: Figure) -> Bootstrapped:
    """The figure alone in a row."""
    return bootstrapped(found.simulated, [found.objective])


def figure_gradient(found: Figure) -> Program:
    """The derivative of a figure with respect to the parameters of its program."""
    (gradient,), _ = _pulled_back(found, [])
    return gradient


def gradients(found: Figure) -> tuple[list[Program], float]:
    """The derivative of a figure, then the same with new weights of the replica samples, several
    times; and how many independent samples it rests on.
    """
    return _pulled_back(found, resample(found.simulated))


def _pulled_back(found: Figure, resamples: Iterable[Again]) -> tuple[list[Program], float]:
    simulated = found.simulated
    depends = ft.partial(_weighting, found, _width(simulated, found.objective), left_open(found))
    every = depends(np.ones(len(simulated.steps)), simulated)
    again = (depends(one.counts, one.simulated) for one in resamples)
    pairs = pull_back(it.chain([every], again))
    if simulated.exceedance is None and every.simulated.exceedance is not None:
        # Of the time that a given share of steps exceed. A resampled one may lie in a gap that no
        # step reaches, where all derivatives of the probability are zero.
        least = float(np.finfo(np.float32).tiny)
        gradients = [_divided(gradient, max(-by, least)) for gradient, by in pairs]
    else:
        gradients = [gradient for gradient, _ in pairs]
    return gradients, support(every.simulated, every.relevance())


def _divided(gradient: Program, by: float) -> Program:
    """By NumPy, for there are many shapes, and each would be compiled."""
    return jax.tree.map(lambda g: jax.device_put(np.asarray(g) / by), gradient)


def left_open(found: Figure) -> tuple[StepParts, str] | None:
    """What steps consist of, and which draw of them the derivative of a quantile leaves open, as it
    follows from the probability that a step takes longer. `None` if it is taken over steps, or if
    no step ends near the quantile, whatever this draw.
    """
    value, simulated, objective = found
    if objective.level is None:
        return None
    last = last_draw(simulated, value, _width(simulated, objective))
    if last is None:
        return None
    parts = step_parts_of(simulated)
    longer = conditional_exceedances(simulated, parts, value, last).steps
    return (parts, last) if np.any(longer * (1 - longer)) else None


def _weighting(
    found: Figure,
    width: float,
    given: tuple[StepParts, str] | None,
    weights: np.ndarray,
    weighed: SimulatedSteps,
) -> Weighting:
    """How a figure of weighted steps depends on steps, smoothed over `width` seconds; or how the
    probability that a step takes longer than the quantile does, given all draws but the last.
    """
    _, simulated, objective = found
    steps, unit = evenly(*in_order(simulated.steps, weights)), 1.0
    # Of how many steps lie beyond a threshold, whether or not a draw is left open.
    levels = objective.level, objective.exceeds
    bounded = simulated.exceedance is not None or levels != (None, None)
    if given:
        parts, last = given
        at = objective.value(steps)
        unit = 2.0 ** np.frexp(at)[1]  # Single precision does not hold what is per second of any.
        simulated = conditional_exceedances(simulated, parts, at, last)
        steps, objective = evenly(*in_order(simulated.steps, weights)), Mean()
    of_steps = objective.slope(steps, width), objective.influence(steps, width) / len(steps)
    slope, influence = (unit * np.interp(simulated.steps, steps, x) for x in of_steps)
    # What is added to all steps acts on the figure as before they were weighted.
    total, wanted = weights @ slope, unit * of_steps[0].sum()
    if objective.monotone and total > 0:
        slope = slope * (wanted / total)
    elif not objective.monotone:
        slope = slope + (wanted - total) / weights.sum()
    return Weighting(simulated, weights, weights * slope, influence, weighed.chunks, bounded)


def _width(simulated: SimulatedSteps, objective: AbstractObjective) -> float:
    """The bandwidth for smoothing over steps: few replica samples may decide many of them."""
    number = support(simulated, np.ones(len(simulated.steps)))
    return bandwidth(simulated.steps, objective, number)


@eqx.filter_custom_vjp
def _estimate(program, objective, options):
    return _value(program, objective, options)[0]


def _value(program, objective, options):
    found = figure(program, objective, **options)
    return jnp.asarray(found.value, program.latencies.mean.dtype), found


@_estimate.def_fwd
def _forward(perturbed, program, objective, options):
    del perturbed
    return _value(program, objective, options)


@_estimate.def_bwd
def _backward(found, cotangent, perturbed, program, objective, options):
    return jax.tree.map(lambda slope: slope * cotangent, figure_gradient(found))


def step_times(
    program: Program, num_samples: int, *, key: "jax.Array", progress: bool = False
) -> Float[Array, " samples"]:
    """Simulates steps and returns the time of each, in seconds, in the order of the steps, which
    are independent of one another. Their law is that of `simulate`, but replicas follow the vector
    rule.

    Differentiable with respect to `program`, as `estimate` is and where it works, for a figure of
    the law of the steps that is smooth in each step time, such as `step_times(...).std()`: a loss
    that depends on which step is which has no derivative by how likely stalls and congestion are.
    Of a quantile only one or two steps have a derivative, which does not converge; use `estimate`.

    **Arguments:**

    - `program`: the step.
    - `num_samples`: how many steps to simulate.
    - `key`: a `jax.random` key. The same key gives common random numbers.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    The times, `(num_samples,)`.
    """
    number = whole_number(num_samples, "num_samples")
    return _step_times(program, {"num_samples": number, "key": key, "progress": progress})


@eqx.filter_custom_vjp
def _step_times(program, options):
    return _times(program, options)[0]


def _times(program, options):
    simulated = simulated_steps(program, **options)
    # Ranks of replicas ascend along the steps as they are simulated.
    words = np.asarray(simulated.run.key).tolist()
    order = np.random.default_rng(words).permutation(len(simulated.steps))
    return jnp.asarray(simulated.steps[order], program.latencies.mean.dtype), (simulated, order)


@_step_times.def_fwd
def _times_forward(perturbed, program, options):
    del perturbed
    return _times(program, options)


@_step_times.def_bwd
def _times_backward(residuals, cotangent, perturbed, program, options):
    simulated, order = residuals
    slope = np.empty(len(order))
    slope[order] = np.asarray(cotangent, np.float64)
    weights = np.ones(len(order))
    influence = _integral(simulated.steps, slope)
    weighting = Weighting(simulated, weights, slope, influence, simulated.chunks, False)
    ((gradient, _),) = pull_back([weighting])
    return gradient


def _integral(steps: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The derivative of a figure of the law with respect to the weight of each step: the integral
    of that with respect to each step time.
    """
    order = np.argsort(steps)
    pieces = np.diff(steps[order]) * (slope[order][1:] + slope[order][:-1]) / 2
    influence = np.empty(len(steps))
    influence[order] = np.concatenate([[0.0], np.cumsum(pieces)])
    return influence - influence.mean()
