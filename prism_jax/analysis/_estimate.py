"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..engine import Composed, composed_steps, given_the_rest, pull_back
from ..program import Program
from ._density import bandwidth
from ._objectives import AbstractObjective, Mean, check_objective


def estimate(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Estimates a figure of the law of the step time.

    Works under `eqx.filter_grad` and `eqx.filter_value_and_grad` with respect to `program`: the
    derivative is taken with respect to every mean, spread, factor and stall rate at once, by
    running the same samples again. It runs a loop on the host, so it is not for use under `jax.jit`
    or `jax.vmap`; the pure core is `sample_replica_ends`.

    **Arguments:**

    - `program`: the step.
    - `objective`: which figure, such as `Mean()`, `Quantile(q)` or `Exceedance(t)`.
    - `num_samples`: how many steps to simulate.
    - `key`: a `jax.random` key. The same key gives common random numbers.

    **Returns:**

    The figure, a scalar in seconds (a probability for `Exceedance`).
    """
    check_objective(objective)
    return _estimate(program, (objective, num_samples, key))


def figure(
    program: Program,
    objective: AbstractObjective,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    like: Composed | None = None,
) -> tuple[float, Composed, AbstractObjective]:
    """A figure with what it was made of: steps, and the objective that takes them to it. See
    `composed_steps` for `like`.
    """
    composed = composed_steps(program, num_samples=num_samples, key=key, like=like)
    if objective.exceeds is not None:
        conditional = given_the_rest(composed, objective.exceeds, bandwidth(composed.steps))
        if conditional is not None:
            composed, objective = conditional, Mean()
    return objective.value(composed.steps), composed, objective


def figure_gradient(composed: Composed, objective: AbstractObjective) -> Program:
    """The derivative of what `figure` gave, with respect to the parameters of its program."""
    slope = objective.slope(composed.steps)
    influence = objective.influence(composed.steps) / len(composed.steps)
    return pull_back(composed, slope, influence)


@eqx.filter_custom_vjp
def _estimate(program, arguments):
    return _value(program, arguments)[0]


def _value(program, arguments):
    objective, num_samples, key = arguments
    value, *how = figure(program, objective, num_samples=num_samples, key=key)
    return jnp.asarray(value, program.latencies.mean.dtype), how


@_estimate.def_fwd
def _forward(perturbed, program, arguments):
    del perturbed
    return _value(program, arguments)


@_estimate.def_bwd
def _backward(how, cotangent, perturbed, program, arguments):
    gradient = figure_gradient(*how)
    return jax.tree.map(
        lambda g: None if g is None else g * cotangent, gradient, is_leaf=lambda g: g is None
    )
