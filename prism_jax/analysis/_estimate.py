"""`estimate`: a figure of the law of the step time, differentiable in the program's parameters; and
`step_times`, the steps themselves.
"""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._misc import whole_number
from ..engine import simulated_steps, through_paths, through_weights
from ..program import Program
from ..replica import gradients_of
from ._check import check_objective
from ._derivative import figure_gradient
from ._figure import figure
from ._objectives import AbstractObjective


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
    under `jax.jit` or `jax.vmap`; use the pure function `sample_replica_ends` there.

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
    options = {"num_samples": number, "key": key, "progress": progress}
    return _estimate(*_parted(program), objective, options)


def _parted(program: Program) -> tuple[Program, Callable[[Program], Program]]:
    """The parameters, and what makes the program of them: to a custom derivative, all arrays of its
    arguments are arrays of JAX.
    """
    parameters, rest = eqx.partition(program, eqx.is_inexact_array)
    return parameters, ft.partial(eqx.combine, rest)


@eqx.filter_custom_vjp
def _estimate(parameters, program_of, objective, options):
    return _value(program_of(parameters), objective, options)[0]


def _value(program, objective, options):
    result = figure(program, objective, **options)
    return jnp.asarray(result.value, program.latencies.mean.dtype), result


@_estimate.def_fwd
def _forward(perturbed, parameters, program_of, objective, options):
    del perturbed
    return _value(program_of(parameters), objective, options)


@_estimate.def_bwd
def _backward(result, cotangent, perturbed, parameters, program_of, objective, options):
    return jax.tree.map(lambda slope: slope * cotangent, figure_gradient(result))


def step_times(
    program: Program, num_samples: int, *, key: "jax.Array", progress: bool = False
) -> Float[Array, " samples"]:
    """Simulates steps and returns the time of each, in seconds, in the order of the steps, which
    are independent of one another.

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
    options = {"num_samples": number, "key": key, "progress": progress}
    return _step_times(*_parted(program), options)


@eqx.filter_custom_vjp
def _step_times(parameters, program_of, options):
    return _times(program_of(parameters), options)[0]


def _times(program, options):
    simulated = simulated_steps(program, **options)
    # Ranks of replicas ascend along the steps as they are simulated.
    words = np.asarray(simulated.run.key).tolist()
    order = np.random.default_rng(words).permutation(len(simulated.steps))
    return jnp.asarray(simulated.steps[order], program.latencies.mean.dtype), (simulated, order)


@_step_times.def_fwd
def _times_forward(perturbed, parameters, program_of, options):
    del perturbed
    return _times(program_of(parameters), options)


@_step_times.def_bwd
def _times_backward(residuals, cotangent, perturbed, parameters, program_of, options):
    simulated, order = residuals
    slope = np.empty(len(order))
    slope[order] = np.asarray(cotangent, np.float64)
    influence = _integral(simulated.steps, slope)
    ordered = np.argsort(simulated.steps)
    around = np.interp(simulated.without, simulated.steps[ordered], influence[ordered])
    lost = influence - np.where(np.isnan(around), 0, around)
    all_steps = np.zeros(len(order), int), 1
    paths = through_paths(simulated, slope, np.abs(slope), *all_steps)
    weights = through_weights(simulated, influence, lost, *all_steps)
    tables = jax.tree.map(np.add, paths, weights).tables
    return jax.tree.map(lambda x: x[0], gradients_of(simulated.run.program, tables))


def _integral(steps: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The derivative of a figure of the law with respect to the weight of each step: the integral
    of that with respect to each step time.
    """
    order = np.argsort(steps)
    pieces = np.diff(steps[order]) * (slope[order][1:] + slope[order][:-1]) / 2
    influence = np.empty(len(steps))
    influence[order] = np.concatenate([[0.0], np.cumsum(pieces)])
    return influence - influence.mean()
