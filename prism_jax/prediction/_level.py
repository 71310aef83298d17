"""A job's kernels as a function of the level of its steps, and the derivatives by it."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Calibrated, Kernels


_Levelled = TypeVar("_Levelled", Kernels, Calibrated)

# Steps of finite differences: of logarithms, of seconds in units of the step, of an exponent.
LEVEL_STEPS = np.array([1e-3, 1e-2, 1e-3, 1e-3])


def with_level(of: _Levelled, values: Float[np.ndarray, "4"], num_replicas: int) -> _Levelled:
    """Kernels, or their changes, with these values of the level; see `calibration.Level`."""
    compute, network, constant, growth = (float(x) for x in values)
    return msgspec.structs.replace(
        of,
        compute=float(np.exp(compute)),
        network=float(np.exp(network)),
        constant_s=max(constant, 0.0),
        growth=growth,
        num_replicas=num_replicas,
    )


def slope_of_level(seconds: Callable[[Kernels], float], kernels: Kernels) -> Float[np.ndarray, "4"]:
    """The derivatives of the logarithm of a step with respect to the parameters of its level."""
    numbers = (np.log(kernels.compute), np.log(kernels.network))
    values = np.array([*numbers, kernels.constant_s, kernels.growth])

    def logs(values):
        return np.log([seconds(with_level(kernels, values, kernels.num_replicas))])

    now = logs(values)
    return slopes_of_level(logs, values, now, LEVEL_STEPS * np.array([1, 1, np.exp(now[0]), 1]))[0]


def slopes_of_level(
    logs: Callable[[Float[np.ndarray, "4"]], Float[np.ndarray, " points"]],
    values: Float[np.ndarray, "4"],
    now: Float[np.ndarray, " points"],
    apart: Float[np.ndarray, "4"],
) -> Float[np.ndarray, "points 4"]:
    """The derivatives of several logarithms by finite differences.

    **Arguments:**

    - `logs`: gives the logarithms for values of the level.
    - `values`: where.
    - `now`: the logarithms there.
    - `apart`: the step of each parameter.
    """
    moved = [(logs(values + step) - now) / step.sum() for step in np.diag(apart)]
    return np.stack(moved, axis=1)
