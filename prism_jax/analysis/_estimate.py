"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
    progress: bool = False,
) -> Float[Array, ""]:
    """Estimates a figure of the law of the step time.

    Works under `eqx.filter_grad` and `eqx.filter_value_and_grad` with respect to `program`: the
    derivative is taken with respect to every mean, spread, factor and stall rate at once, by
    running the same samples again. It runs a loop on the host, so it is not for use under `jax.jit`
    or `jax.vmap`; the pure core is `sample_replica_ends`. Replicas follow the vector rule, also
    where `simulate` takes the exact one.

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
    """A figure, the steps (or probabilities) that it was made of, and the objective that takes
    these to it.
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
    progress: bool = False,
) -> Figure:
    """A figure with what it was made of. See `composed_steps` for `like`."""
    options: dict[str, Any] = {"key": key, "like": like, "progress": progress}
    composed = composed_steps(program, num_samples=num_samples, **options)
    return figure_of(composed, objective)


def figure_of(composed: Composed, objective: AbstractObjective) -> Figure:
    """`figure` of steps that are composed."""
    if objective.exceeds is not None:
        conditional = given_the_rest(composed, objective.exceeds, bandwidth(composed.steps))
        if conditional is not None:
            composed, objective = conditional, Mean()
    return Figure(objective.value(composed.steps), composed, objective)


def figure_gradient(composed: Composed, objective: AbstractObjective) -> Program:
    """The derivative of what `figure` gave, with respect to the parameters of its program."""
    slope = objective.slope(composed.steps)
    influence = objective.influence(composed.steps) / len(composed.steps)
    return pull_back(composed, slope, influence)


def kept_of(found: Figure, objective: AbstractObjective) -> Float[np.ndarray, " n"]:
    """What the figure of several batches needs of one: its steps, or a probability, whose mean it
    is.
    """
    return found.composed.steps if objective.exceeds is None else np.array([found.value])


def figure_of_all(kept: Float[np.ndarray, " n"], objective: AbstractObjective) -> float:
    """The figure of batches of one size, from their `kept_of` one after the other."""
    return objective.value(kept) if objective.exceeds is None else float(np.mean(kept))


def gradients_of_batches(
    batches: Sequence[Figure], objective: AbstractObjective
) -> Iterator[Program]:
    """What each of several batches of as many steps tells of the derivative of the figure of all,
    which is the mean of these.
    """
    if any(one.objective is not objective for one in batches):
        yield from (figure_gradient(one.composed, one.objective) for one in batches)
        return
    steps = np.concatenate([one.composed.steps for one in batches])
    slope, influence = objective.slope(steps), objective.influence(steps) / len(steps)
    count, first = len(batches), 0
    for one in batches:
        mine = slice(first, first + len(one.composed.steps))
        yield pull_back(one.composed, count * slope[mine], count * influence[mine])
        first = mine.stop


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
