"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ..engine import (
    Composed,
    composed_steps,
    first_batches_of,
    given_the_rest,
    pull_back,
    pull_back_batches,
)
from ..program import Program
from ._batches import Batched, batched
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
    batches: int = 1,
    like: Composed | None = None,
    progress: bool = False,
) -> Figure:
    """A figure with the steps behind it. See `composed_steps` for `batches` and `like`."""
    options: dict[str, Any] = {"key": key, "batches": batches, "like": like, "progress": progress}
    return figure_of(composed_steps(program, num_samples=num_samples, **options), objective)


def figure_of(composed: Composed, objective: AbstractObjective) -> Figure:
    """`figure`, from steps that are already composed."""
    if objective.exceeds is not None:
        conditional = given_the_rest(composed, objective.exceeds, bandwidth(composed.steps))
        if conditional is not None:
            composed, objective = conditional, Mean()
    return Figure(objective.value(composed.whole), composed, objective)


def figure_gradient(composed: Composed, objective: AbstractObjective) -> Program:
    """The derivative of the result of `figure` with respect to the parameters of its program."""
    return pull_back(composed, *_weights(composed, objective))


def first_batches(found: Figure, number: int) -> Figure:
    """The same figure from its first `number` batches only."""
    few = first_batches_of(found.composed, number)
    return Figure(found.objective.value(few.whole), few, found.objective)


def figure_batches(found: Figure) -> Batched:
    """The figure of each batch, and of all their steps."""
    value = found.objective.value
    return batched(found.composed, lambda steps: np.array([value(steps)]))


def gradient_batches(found: Figure) -> list[Program]:
    """The derivative of the figure of each batch."""
    _, composed, objective = found
    # The bandwidth of all steps, so that the mean over batches has no more bias than all steps.
    width = bandwidth(composed.steps)
    batches = np.split(composed.steps, composed.batches)
    slope = np.concatenate([objective.slope(batch, width) for batch in batches])
    influence = objective.influence(composed.steps) / len(batches[0])
    return pull_back_batches(composed, slope, influence)


def _weights(composed: Composed, objective: AbstractObjective) -> tuple[np.ndarray, np.ndarray]:
    steps = composed.steps
    return objective.slope(steps, bandwidth(steps)), objective.influence(steps) / len(steps)


@eqx.filter_custom_vjp
def _estimate(program, arguments):
    return _value(program, arguments)[0]


def _value(program, arguments):
    objective, num_samples, key, progress = arguments
    options: dict[str, Any] = {"num_samples": num_samples, "key": key, "progress": progress}
    value, *how = figure(program, objective, **options)
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
