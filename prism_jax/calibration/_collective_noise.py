"""How much of the variation that steps do not share is noise of collectives."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from ..data import Kernels, Priors, Variation
from ._observe import Observed, core_spread, spread_of
from ._scale import Scale, Simulation, with_laws


# The collectives between replicas, which share one law.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# The grid of the likelihood: factors on the usual noise, and shares of a spread.
_FACTORS = np.exp(np.linspace(-3.5, 3.5, 281))
_PARTS = np.exp(np.linspace(-7, 0, 281))
_TURNS = 3


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
