"""The level of a job's steps: the factors on its kernels' latencies, and the added constant."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from ..data import LEVEL, Kernels, Priors
from ..prediction import LEVEL_STEPS, slopes_of_level, with_level


# A larger factor on compute means a mistake in the job or in the unit.
_FURTHEST = 10.0
_ITERATIONS = 12
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
    apart = LEVEL_STEPS * np.array([1, 1, shortest, 1])

    def logs(values: Float[np.ndarray, "4"]) -> Float[np.ndarray, " points"]:
        pairs = zip(points, kernels, strict=True)
        return np.log([p.seconds(with_level(k, values, num_replicas)) for p, k in pairs])

    values, precision = mean, np.diag([0, *deviation[1:] ** -2.0])
    first = found = logs(values)
    information = precision
    for _ in range(_ITERATIONS):
        slope = slopes_of_level(logs, values, found, apart)
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


def _prior(priors: Priors, largest: float) -> tuple[np.ndarray, np.ndarray]:
    rest = (priors.network, priors.constant_s, priors.growth)
    mean = np.array([0.0, *(one.mean for one in rest)])
    deviation = np.array([np.inf, *(one.deviation for one in rest)])
    mean[2], deviation[2] = min(mean[2], largest), min(deviation[2], largest)
    return mean, deviation
