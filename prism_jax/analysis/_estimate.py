"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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
    return figure_of(composed, objective)


def figure_of(
    composed: Composed, objective: AbstractObjective
) -> tuple[float, Composed, AbstractObjective]:
    """`figure` of steps that are composed."""
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


def of_batch(composed: Composed, objective: AbstractObjective) -> Float[np.ndarray, " n"]:
    """What `of_all` needs of a batch: its steps, or a probability that is a mean already."""
    if objective.exceeds is None:
        return composed.steps
    return np.array([figure_of(composed, objective)[0]])


def of_all(batches: Sequence[np.ndarray], objective: AbstractObjective) -> float:
    """The figure of the steps of all batches together; each has as many."""
    together = np.concatenate(batches)
    return objective.value(together) if objective.exceeds is None else float(np.mean(together))


def gradients_of_batches(
    batches: Sequence[Composed], objective: AbstractObjective
) -> Iterator[Program]:
    """What each of several batches of as many steps tells of the derivative of the figure of all,
    which is the mean of these.
    """
    found = [figure_of(composed, objective)[1:] for composed in batches]
    if any(how is not objective for _, how in found):
        yield from (figure_gradient(composed, how) for composed, how in found)
        return
    steps = np.concatenate([composed.steps for composed in batches])
    slope, influence = objective.slope(steps), objective.influence(steps) / len(steps)
    count, first = len(batches), 0
    for composed in batches:
        mine = slice(first, first + len(composed.steps))
        yield pull_back(composed, count * slope[mine], count * influence[mine])
        first = mine.stop


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
