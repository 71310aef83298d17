"""Parameters of a program that lower a figure of the step time most, by its gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, PyTree

from .._misc import quoted, whole_number
from .._progress import progress_bar
from ..engine import check_program
from ..program import Program
from ._check import check_objective, check_reached
from ._derivative import figure_gradient
from ._descent import Descent, descend, last_tenth
from ._estimate import step_times
from ._figure import figure
from ._measured import Wasserstein, shares
from ._objectives import AbstractObjective


_RATE = 0.02
# Standard errors are from so many gradients, each of its own draws and its own measured steps; and
# from the differences of gradients where a logarithm is this much larger or smaller.
_GROUPS, _CHANGE = 32, 0.05
# Newton's method is trusted so far, and where each combination of parameters matters so much,
# relative to that which matters most.
_FARTHEST, _LEAST = 0.25, 1e-3
# It ends with a step of fewer standard errors than this, or fails after so many rounds.
_NEAR, _ROUNDS = 3, 4


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of `fit_parameters`.

    **Attributes:**

    - `program`: the program with the fitted parameters.
    - `path`: `(num_steps,)`, the objective before each step, in its unit.
    - `num_steps`: how many steps the optimizer took: fewer than allowed if nothing moves any more.
    - `settled`: whether the last tenth of the path, of at least four steps, has no slope beyond its
        noise, which is taken for one in 1 % of cases.
    - `errors`: the standard errors of the parameters, as `where` picks these. They count the draws
        and the measured steps of a `CRPS`, as if these were independent; of a function of step
        times, the draws alone. They are `nan` for a parameter near a bound, where the objective
        has no minimum within 20 %, for `Wasserstein`, whose derivative jumps, and for more
        parameters than half the steps.
    """

    program: Program
    path: Float[np.ndarray, " num_steps"]
    num_steps: int
    settled: bool
    errors: Any


def fit_parameters(
    program: Program,
    objective: AbstractObjective | Callable[..., Any],
    where: Callable[[Program], Any],
    *,
    num_samples: int,
    key: "jax.Array",
    optimizer: Any = None,
    num_steps: int = 200,
    bounds: tuple[Any, Any] | None = None,
    common_draws: bool = False,
    progress: bool = False,
) -> Fit:
    """Finds the parameters of a program that minimise a figure of the step time, such as the
    distance of its law from measured steps, by following its gradient.

    The optimizer moves the logarithms of the parameters, so that they stay positive. From their
    means over the last tenth of its path Newton's method leads to the result, by gradients of 32
    times `num_samples` simulated steps; where it does not, these means are the result.

    **Arguments:**

    - `program`: the step, with the values from which the parameters start.
    - `objective`: what to minimise, such as `CRPS(measured)`; or a function of simulated step
        times, an array `(num_samples,)` in seconds, that is as smooth in each as `step_times`
        needs, such as `lambda times: times.std() / times.mean()`.
    - `where`: picks the parameters, as in `eqx.tree_at`: one array of the program, or a PyTree of
        them, such as `lambda p: [p.variability.residual[kind].sigma for kind in ("a", "b")]`.
    - `num_samples`: how many steps to simulate for each step of the fit.
    - `key`: a `jax.random` key.
    - `optimizer`: an `optax.GradientTransformation` of one vector, the logarithms of all parameters
        in the order of `jax.tree.leaves`, that needs no function of these. By default,
        `optax.adam(0.02)`: no parameter changes by much more than 2 % in a step.
    - `num_steps`: the most steps of the fit.
    - `bounds`: the least and the largest values: a pair of PyTrees as `where` picks, or of parts of
        these that hold for all below them, such as one number each. By default, none.
    - `common_draws`: whether all steps of the optimizer have the same draws, so that the path is
        smooth.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Fit`][].

    **Raises:**

    `ValueError` if `where` picks nothing, something that is not a parameter, or a parameter that is
    not positive; if a parameter starts outside of its bounds; or if the objective or its gradient
    is not finite.

    **Source:** van der Vaart, *Asymptotic statistics* (1998): standard errors of theorem 5.23, and
    estimators of one step of section 5.7.
    """
    check_program(program, key)
    if not callable(objective):
        check_objective(objective)
    count, most = whole_number(num_samples, "num_samples"), whole_number(num_steps, "num_steps")
    picked = _picked(program, where)
    start, (low, high) = np.log(_flat(picked)), _log_bounds(bounds, picked)
    if optimizer is None:
        import optax

        optimizer = optax.adam(_RATE)
    task = _Task(program, objective, where, count)
    path_key, newton_key = jax.random.split(key)

    def at_step(logs: np.ndarray, step: int) -> tuple[float, np.ndarray]:
        draws = path_key if common_draws else jax.random.fold_in(path_key, step)
        value, slopes = _value_and_slopes(task, logs, draws)
        if isinstance(objective, AbstractObjective) and step == 0:
            check_reached(objective, value)
        advance(1)
        return value, slopes

    with progress_bar(most, progress, "fit", "step") as advance:
        path = descend(at_step, start, optimizer, most, lambda logs: np.clip(logs, low, high))
    logs, errors = _newton(task, path, low, high, newton_key)
    errors = _unflattened(task, errors * np.exp(logs))
    return Fit(_at(task, logs), np.array(path.values), len(path.values), path.settled, errors)


class _Task(NamedTuple):
    """What is minimised over the logarithms of the parameters that `where` picks, in one vector."""

    program: Program
    objective: Any
    where: Callable[[Program], Any]
    num_samples: int


def _flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])


def _unflattened(task: _Task, values: np.ndarray) -> PyTree:
    flat, unravel = ravel_pytree(task.where(task.program))
    return unravel(jnp.asarray(values, flat.dtype))


def _at(task: _Task, logs: np.ndarray) -> Program:
    """The program with other parameters."""
    return eqx.tree_at(task.where, task.program, _unflattened(task, np.exp(logs)))


def _value_and_slopes(task: _Task, logs: np.ndarray, key: "jax.Array") -> tuple[float, np.ndarray]:
    """The objective, and its derivative with respect to the logarithms."""
    program, options = _at(task, logs), {"num_samples": task.num_samples, "key": key}
    if isinstance(task.objective, AbstractObjective):
        result = figure(program, task.objective, **options)
        value, gradient = result.value, figure_gradient(result)
    else:
        value, gradient = eqx.filter_value_and_grad(
            lambda program: task.objective(step_times(program, **options))
        )(program)
    slopes = np.exp(logs) * _flat(task.where(gradient))
    if not np.all(np.isfinite([value, *slopes])):
        raise ValueError(
            f"The objective is {float(value):g} and its gradient {quoted(slopes.tolist())} where "
            f"the parameters are {quoted(np.exp(logs).tolist())}; set `bounds` or start elsewhere."
        )
    return float(value), slopes


def _newton(
    task: _Task, path: Descent, low: np.ndarray, high: np.ndarray, key: "jax.Array"
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithms where Newton's method leads from their means over the last tenth of the path,
    and their standard errors. Gradients are means of those of parts of the measured steps, each
    with draws of its own; their scatter gives the errors.
    """
    mean = np.mean(last_tenth(path.points), axis=0)
    lowest, highest = np.maximum(low, mean - _FARTHEST), np.minimum(high, mean + _FARTHEST)
    lowest, highest = lowest + _CHANGE, highest - _CHANGE  # Differences stay within them.
    free = np.flatnonzero((lowest < mean) & (mean < highest))
    logs, errors = mean.copy(), np.full(len(mean), np.nan)
    # The derivative of a Wasserstein distance jumps, so it tells no distance from the minimum.
    jumps = isinstance(task.objective, Wasserstein)
    if jumps or not 0 < 2 * len(free) <= len(path.values):
        return mean, errors
    changes = _CHANGE * np.eye(len(mean))[free]
    fine = task._replace(num_samples=task.num_samples * max(_GROUPS // (2 * len(free)), 1))
    objectives = shares(task.objective, _GROUPS)
    draws = jax.random.split(key, len(objectives))
    groups = [task._replace(objective=objective) for objective in objectives]
    for _ in range(_ROUNDS):
        differences = [
            np.subtract(*(_value_and_slopes(fine, logs + sign * by, key)[1] for sign in (1, -1)))
            for by in changes
        ]
        curvature = np.array(differences)[:, free] / (2 * _CHANGE)
        eigenvalues, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
        if eigenvalues[0] <= _LEAST * eigenvalues[-1]:
            break
        inverse = vectors / eigenvalues @ vectors.T
        pairs = zip(groups, draws, strict=True)
        gradients = np.array([_value_and_slopes(g, logs, draw)[1][free] for g, draw in pairs])
        step = -inverse @ gradients.mean(axis=0)
        logs[free] += step
        if np.any(((logs < lowest) | (logs > highest))[free]):
            break
        scatter = np.atleast_2d(np.cov(gradients.T)) / len(gradients)
        errors[free] = np.sqrt(np.diag(inverse @ scatter @ inverse))
        if np.all(np.abs(step) < _NEAR * errors[free]):
            return logs, errors
    return mean, np.full(len(mean), np.nan)


def _picked(program: Program, where: Callable[[Program], Any]) -> PyTree:
    """The parameters that `where` picks, which are positive."""
    picked = where(program)
    leaves = jax.tree.leaves(picked)
    if not leaves or not all(eqx.is_inexact_array(leaf) for leaf in leaves):
        description = "nothing" if not leaves else "what is not an array of floats"
        raise ValueError(
            f"`where` picks {description}; pick parameters, such as `lambda p: p.latencies.mean`."
        )
    try:
        eqx.tree_at(where, program, picked)
    except (TypeError, ValueError):
        raise ValueError(
            "`where` picks what is not part of the program; pick its own arrays, as `eqx.tree_at` "
            "does."
        ) from None
    values = _flat(picked)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(
            f"The parameters that `where` picks are {quoted(values.tolist())}, and a fit moves "
            "their logarithms; start from positive values."
        )
    return picked


def _log_bounds(bounds: tuple[Any, Any] | None, picked: PyTree) -> tuple[np.ndarray, np.ndarray]:
    """The logarithms of the bounds of each parameter."""

    def of_each(bound: Any) -> np.ndarray:
        of_leaves = jax.tree.broadcast(bound, picked)
        return _flat(
            jax.tree.map(
                lambda x, y: np.broadcast_to(np.asarray(y, x.dtype), x.shape), picked, of_leaves
            )
        )

    try:
        low, high = map(of_each, (0.0, np.inf) if bounds is None else bounds)
    except (TypeError, ValueError):
        raise ValueError(
            "`bounds` must be a pair, each a number or a PyTree like that which `where` picks."
        ) from None
    values = _flat(picked)
    if not np.all((low >= 0) & (low <= values) & (values <= high)):
        start, low, high = (quoted(x.tolist()) for x in (values, low, high))
        raise ValueError(
            f"The parameters start at {start}, and `bounds` must be at least 0 and hold them: they "
            f"are {low} and {high}."
        )
    with np.errstate(divide="ignore"):
        return np.log(low), np.log(high)
