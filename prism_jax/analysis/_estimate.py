"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..engine import Composed, composed_steps, pull_back
from ..program import Program
from ._objectives import AbstractObjective


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
    - `objective`: which figure: `Mean()`, `Std()`, `Quantile(q)`, `CVaR(q)`, `Exceedance(t)`,
        `CRPS(measured)`.
    - `num_samples`: how many steps to simulate.
    - `key`: a `jax.random` key. The same key gives common random numbers.

    **Returns:**

    The figure, a scalar in seconds (a probability for `Exceedance`).
    """
    if not isinstance(objective, AbstractObjective):
        raise ValueError(
            f"The objective {objective!r} must be one of `Mean()`, `Std()`, `Quantile(q)`, "
            "`CVaR(q)`, `Exceedance(threshold)` and `CRPS(measured)`."
        )
    return _estimate(program, (objective, num_samples, key))


@eqx.filter_custom_vjp
def _estimate(program, arguments):
    objective, num_samples, key = arguments
    composed = composed_steps(program, num_samples=num_samples, key=key)
    return jnp.asarray(objective.value(composed.steps), program.latencies.mean.dtype)


@_estimate.def_fwd
def _forward(perturbed, program, arguments):
    objective, num_samples, key = arguments
    composed = composed_steps(program, num_samples=num_samples, key=key)
    value = jnp.asarray(objective.value(composed.steps), program.latencies.mean.dtype)
    return value, composed


@_estimate.def_bwd
def _backward(composed: Composed, cotangent, perturbed, program, arguments):
    objective, *_ = arguments
    slope = objective.slope(composed.steps)
    influence = objective.influence(composed.steps) / len(composed.steps)
    gradient = pull_back(program, composed, slope, influence)
    return jax.tree.map(
        lambda g: None if g is None else g * cotangent, gradient, is_leaf=lambda g: g is None
    )
