"""Following a gradient downhill by an optimizer of optax, among the points that are allowed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


# A path that is settled has no slope in its last tenth, beyond so many standard errors.
_TENTH, _STANDARD_ERRORS = 10, 3.0
_FEWEST = 4


class Descent(NamedTuple):
    """The points of a descent, vectors in float64, and the value at each."""

    points: list[np.ndarray]
    values: list[float]

    @property
    def last_tenth(self) -> list[np.ndarray]:
        """The last tenth of the points."""
        return self.points[-max(len(self.points) // _TENTH, 1) :]

    @property
    def settled(self) -> bool:
        """Whether a line through the last tenth of the values has no slope beyond its noise."""
        values = np.array(self.values[-len(self.last_tenth) :])
        if len(values) < _FEWEST:
            return False
        times = np.arange(len(values)) - (len(values) - 1) / 2
        slope = np.sum(times * values) / np.sum(times**2)
        residuals = values - np.mean(values) - slope * times
        variance = np.sum(residuals**2) / (len(values) - 2) / np.sum(times**2)
        return bool(abs(slope) <= _STANDARD_ERRORS * np.sqrt(variance))


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
