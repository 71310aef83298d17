"""Following a gradient downhill by an optimizer of optax, among the points that are allowed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit


# A slope is had from so many steps; noise is taken for one in this share of cases.
_FEWEST, _MISTAKEN = 4, 0.01


class Descent(NamedTuple):
    """The points of a descent, vectors in float64, and the value at each."""

    points: list[np.ndarray]
    values: list[float]

    @property
    def settled(self) -> bool:
        """Whether a line through the last tenth of the values has no slope beyond its noise."""
        values = np.array(last_tenth(self.values, _FEWEST))
        if len(values) < _FEWEST:
            return False
        times = np.arange(len(values)) - (len(values) - 1) / 2
        slope = np.sum(times * values) / np.sum(times**2)
        residuals = values - np.mean(values) - slope * times
        variance = np.sum(residuals**2) / (len(values) - 2) / np.sum(times**2)
        limit = stdtrit(len(values) - 2, 1 - _MISTAKEN / 2)  # Of Student's t.
        return bool(abs(slope) <= limit * np.sqrt(variance))


def last_tenth(path: list[Any], fewest: int = 1) -> list[Any]:
    """The last tenth of a path, but so many of its steps at least."""
    return path[-max(len(path) // 10, fewest) :]


def descend(
    value_and_gradient: Callable[[np.ndarray, int], tuple[float, np.ndarray]],
    start: np.ndarray,
    optimizer: Any,
    num_steps: int,
    project: Callable[[np.ndarray], np.ndarray],
    still: float = 0.0,
) -> Descent:
    """The points that an optimizer takes, each projected onto those that are allowed.

    **Arguments:**

    - `value_and_gradient`: of a point, and of the number of the step.
    - `optimizer`: an `optax.GradientTransformation`.
    - `num_steps`: how many points are evaluated at most.
    - `still`: it ends where no coordinate would move by more than this.
    """
    import optax

    optimizer = optax.with_extra_args_support(optimizer)
    point, state, path = start, optimizer.init(jnp.asarray(start)), Descent([], [])
    for step in range(num_steps):
        value, gradient = value_and_gradient(point, step)
        path.points.append(point)
        path.values.append(value)
        with jax.numpy_dtype_promotion("standard"):  # Schedules of optax need it.
            updates, state = optimizer.update(
                jnp.asarray(gradient), state, jnp.asarray(point), value=value
            )
        # In float64: what fills a budget or meets a bound does so exactly.
        moved = project(point + np.asarray(updates, float))
        if np.max(np.abs(moved - point)) <= still:
            break
        point = moved
    return path
