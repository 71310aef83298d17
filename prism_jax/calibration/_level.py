"""The level of a job's steps: the factors on its kernels' latencies, and the added constant."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import LEVEL, Calibrated, Kernels, Priors


_Levelled = TypeVar("_Levelled", Kernels, Calibrated)

# A larger factor on compute means a mistake in the job or in the unit.
_FURTHEST = 10.0
_ITERATIONS = 12
# Steps of finite differences: of logarithms, of seconds in units of the step, of an exponent.
_APART = np.array([1e-3, 1e-2, 1e-3, 1e-3])
# Steps determine a parameter if they reduce its uncertainty below this share of the prior's.
_TOLD = 0.7


@dataclasses.dataclass(frozen=True)
class Level:
    """The parameters of the level, and their uncertainty.

    **Attributes:**

    - `values`: the logarithms of the factors on compute and on communication between nodes, the
        constant of a step in seconds, and the exponent of the replicas.
    - `covariance`: the covariance of these parameters.
    - `prior`: the names of those that the steps hardly determine.
    """

    values: Float[np.ndarray, "4"]
    covariance: Float[np.ndarray, "4 4"]
    prior: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Point:
    """A median to agree with.

    **Attributes:**

    - `seconds`: the step of a job without variability, as a function of its kernels.
    - `median`: the value that it should have, in seconds.
    - `noise`: the standard error of the logarithm of the median.
    - `name`: the name of the job, for messages.
    """

    seconds: Callable[[Kernels], float]
    median: float
    noise: float
    name: str = "the job"


def with_level(of: _Levelled, values: Float[np.ndarray, "4"], num_replicas: int) -> _Levelled:
    """Kernels, or their changes, with these values of the level; see `Level`."""
    compute, network, constant, growth = (float(x) for x in values)
    return msgspec.structs.replace(
        of,
        compute=float(np.exp(compute)),
        network=float(np.exp(network)),
        constant_s=max(constant, 0.0),
        growth=growth,
        num_replicas=num_replicas,
    )


def fit_level(
    points: Sequence[Point], kernels: Sequence[Kernels], num_replicas: int, priors: Priors
) -> Level:
    """The most likely level, by Gauss-Newton steps. Compute has no prior; the other parameters have
    priors from other systems.

    **Raises:**

    `ValueError` if no factor on compute of up to ten explains a median.
    """
    shortest = min(point.median for point in points)
    mean, deviation = _prior(priors, priors.constant_share.value * shortest)
    wanted = np.log([point.median for point in points])
    noise = np.array([point.noise for point in points])
    apart = _APART * np.array([1, 1, shortest, 1])

    def logs(values: Float[np.ndarray, "4"]) -> Float[np.ndarray, " points"]:
        pairs = zip(points, kernels, strict=True)
        return np.log([p.seconds(with_level(k, values, num_replicas)) for p, k in pairs])

    values, precision = mean, np.diag([0, *deviation[1:] ** -2.0])
    first = found = logs(values)
    information = precision
    for _ in range(_ITERATIONS):
        slope = _slope(logs, values, found, apart)
        information = slope.T @ (slope / noise[:, None] ** 2) + precision
        gradient = slope.T @ ((found - wanted) / noise**2) + precision @ (values - mean)
        step = -np.linalg.solve(information, gradient)
        # Far from the solution the logarithm is not linear, so a step is at most a factor of e.
        values = values + step / max(1.0, float(np.max(np.abs(step[:2]))))
        if abs(values[0]) > np.log(_FURTHEST):
            far = int(np.argmax(np.abs(wanted - first)))
            raise ValueError(
                f"{points[far].name}: the measured median of {points[far].median:.4g} s is too far "
                f"from the job's {np.exp(first[far]):.4g} s: no factor of up to {_FURTHEST:g} on "
                "compute explains it; check the unit of the step times, and the job."
            )
        found = logs(values)
        if np.max(np.abs(step)) < 1e-5:
            break
    values[2] = max(values[2], 0.0)
    covariance = np.linalg.inv(information)
    known = np.sqrt(np.diag(covariance))[1:] < _TOLD * deviation[1:]
    names = (name for name, told in zip(LEVEL[1:], known, strict=True) if not told)
    return Level(values, covariance, tuple(names))


def slope_of_level(seconds: Callable[[Kernels], float], kernels: Kernels) -> Float[np.ndarray, "4"]:
    """The derivatives of the logarithm of a step with respect to the parameters of its level."""
    numbers = (np.log(kernels.compute), np.log(kernels.network))
    values = np.array([*numbers, kernels.constant_s, kernels.growth])

    def logs(values):
        return np.log([seconds(with_level(kernels, values, kernels.num_replicas))])

    now = logs(values)
    return _slope(logs, values, now, _APART * np.array([1, 1, np.exp(now[0]), 1]))[0]


def _slope(logs, values, now, apart) -> Float[np.ndarray, "points 4"]:
    moved = [(logs(values + step) - now) / step.sum() for step in np.diag(apart)]
    return np.stack(moved, axis=1)


def _prior(priors: Priors, largest: float) -> tuple[np.ndarray, np.ndarray]:
    rest = (priors.network, priors.constant_s, priors.growth)
    mean = np.array([0.0, *(one.mean for one in rest)])
    deviation = np.array([np.inf, *(one.deviation for one in rest)])
    mean[2], deviation[2] = min(mean[2], largest), min(deviation[2], largest)
    return mean, deviation
