"""The most likely level of a job's steps (the factors on its kernels' latencies, and the added
constant), and the most likely noise of its collectives: how much of the variation that steps do not
share they explain.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import LEVEL, Kernels, Priors, Variation
from ..prediction import LEVEL_STEPS, slopes_of_level, with_level
from ._observe import Observed, core_spread, spread_of
from ._scale import Scale, Simulation, with_laws


# A larger factor on compute means a mistake in the job or in the unit.
_FURTHEST = 10.0
_ITERATIONS = 12
# Steps determine a parameter if they reduce its uncertainty below this share of the prior's.
_TOLD = 0.7
# The collectives between replicas, which share one law.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# The grid of the likelihood: factors on the usual noise, and shares of a spread.
_FACTORS = np.exp(np.linspace(-3.5, 3.5, 281))
_PARTS = np.exp(np.linspace(-7, 0, 281))
_TURNS = 3


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
    largest = priors.constant_share.value * shortest
    rest = (priors.network, priors.constant_s, priors.growth)
    mean = np.array([0.0, *(one.mean for one in rest)])
    deviation = np.array([np.inf, *(one.deviation for one in rest)])
    mean[2], deviation[2] = min(mean[2], largest), min(deviation[2], largest)
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


@dataclasses.dataclass(frozen=True)
class Split:
    """The components of the spread of the core at one scale: variances, relative to the step.

    **Attributes:**

    - `alone`: the observed variance that a step does not share with the next.
    - `kernels`: the part of it from kernels whose noise is known. It is extrapolated, and negative
        if compute hides collectives with little noise.
    - `collectives`: the part from collectives, if the standard deviation of each is one.
    - `num_steps`: how many steps were observed.
    """

    alone: float
    kernels: float
    collectives: float
    num_steps: int


def with_noise(kernels: Kernels, noise: float | None) -> tuple[Variation, ...]:
    """The laws of collectives with the standard deviation `noise`. Laws of other families than the
    log-normal do not change, nor do any if `noise` is `None`.
    """
    if noise is None:
        return ()
    return tuple(
        msgspec.structs.replace(v, parameters={"sigma": float(noise)})
        for v in kernels.variability
        if v.kernel in _KINDS and v.component == "residual" and v.family == "lognormal"
    )


def noise_of_collectives(
    scales: Sequence[Scale], kernels: Sequence[Kernels], priors: Priors, simulation: Simulation
) -> float | None:
    """The most likely standard deviation of the logarithm of a collective's latency; `None` if the
    jobs have no collectives that determine it.

    **Arguments:**

    - `kernels`: the kernels of each scale, at the level of its runs.
    """
    noise: float | None = float(np.exp(priors.collective_noise.mean))
    # A collective beside compute shows only if it ends later, which is more likely with more noise.
    for _ in range(_TURNS):
        splits = splits_of(scales, kernels, priors, simulation, noise)
        noise = most_likely_noise([one for one in splits if one.collectives > 0], priors)
        if noise is None:
            break
    return noise


def most_likely_noise(splits: Sequence[Split], priors: Priors) -> float | None:
    """The most likely noise of collectives. Variation that steps do not share is either noise of
    collectives, whose effect follows from the program, or a step's own, which is the same at each
    scale. Both have priors: log-normal for collectives, and half-Cauchy for a step's own variation,
    which may be much larger than usual. Scales may differ by more than chance.
    """
    if not splits:
        return None
    usual, own = priors.collective_noise, priors.step_alone
    noise = np.exp(usual.mean) * _FACTORS[:, None]
    step = np.sqrt(max(one.alone for one in splits)) * _PARTS
    cost = (
        np.log1p((step / own.value) ** 2) + (np.log(_FACTORS)[:, None] / usual.deviation) ** 2 / 2
    )
    for one in splits:
        predicted = np.maximum(one.kernels + one.collectives * noise**2, 0) + step**2
        # The error of a variance's logarithm is twice that of the standard deviation's logarithm.
        error = 2 / one.num_steps + (2 * priors.collective_scale.deviation) ** 2
        cost = cost + np.log(one.alone / predicted) ** 2 / (2 * error)
    best, _ = np.unravel_index(np.argmin(cost), cost.shape)
    return float(noise[best, 0])


def alone(observed: Observed, spread: float, priors: Priors) -> float:
    """The part of the core's variance that a step does not share with the next. The shared part
    cannot be estimated from few steps, and is shrunk towards that of other systems.
    """
    known = priors.step_shared
    weights = [observed.num_steps, known.observations]
    shared = float(np.average([observed.shared, known.value], weights=weights))
    return (1 - shared) * spread**2


def splits_of(
    scales: Sequence[Scale],
    kernels: Sequence[Kernels],
    priors: Priors,
    simulation: Simulation,
    about: float | None = None,
) -> list[Split]:
    """The splits from simulated steps with two noises, around `about` (by default, the usual
    noise), assuming that variances are linear in the square of the noise.
    """
    about = float(np.exp(priors.collective_noise.mean)) if about is None else about
    noises = about * np.array([0.7, 1.2])
    noisy = [
        (scale.job, with_laws(one, with_noise(one, noise)))
        for scale, one in zip(scales, kernels, strict=True)
        for noise in noises
    ]
    variances = np.array([core_spread(steps) ** 2 for steps in simulation.steps_of(noisy)])
    splits = []
    for scale, (less, more) in zip(scales, variances.reshape(-1, 2), strict=True):
        each = (more - less) / (noises[1] ** 2 - noises[0] ** 2)
        rest = float(more - each * noises[1] ** 2)
        observed = scale.observed
        own = alone(observed, spread_of(observed, priors), priors)
        splits.append(Split(own, rest, each, observed.num_steps))
    return splits
