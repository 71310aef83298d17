"""How much of what one step has, and the next has not, is the noise of collectives."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from ..data import Kernels, Priors, Variation, replace_variations
from ._observe import Observed, core_spread
from ._scale import Scale, Simulation
from ._step_law import spread_of


# What replicas do together, with one law for all of it.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# The likelihood's grid: factors of the noise that is usual, and parts of a spread.
_FACTORS = np.exp(np.linspace(-3.5, 3.5, 281))
_PARTS = np.exp(np.linspace(-7, 0, 281))
_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Split:
    """What makes the spread of the core at one scale. Variances, relative to the step.

    **Attributes:**

    - `alone`: what is observed of what a step does not share with the next.
    - `kernels`: what kernels make of it whose noise is known; negative where collectives
        that are less noisy would be hidden.
    - `collectives`: what collectives do, for a standard deviation of one of each.
    - `num_steps`: how many were observed.
    """

    alone: float
    kernels: float
    collectives: float
    num_steps: int


def with_noise(kernels: Kernels, noise: float | None) -> tuple[Variation, ...]:
    """The laws of collectives whose standard deviation is `noise`; other families than the
    log-normal stay as they are, and all do where it is `None`.
    """
    if noise is None:
        return ()
    return tuple(
        msgspec.structs.replace(v, parameters={"sigma": float(noise)})
        for v in kernels.variability
        if v.kernel in _KINDS and v.component == "residual" and v.family == "lognormal"
    )


def noise_of_collectives(
    scales: Sequence[Scale],
    kernels: Sequence[Kernels],
    priors: Priors,
    simulation: Simulation,
) -> float | None:
    """The standard deviation of the logarithm of a collective's latency that is most likely; `None`
    where the jobs have none that tell.

    **Arguments:**

    - `kernels`: of each scale, at the level that its runs have.
    """
    noise: float | None = float(np.exp(priors.collective_noise.mean))
    # What runs beside compute shows only where it ends later: the more, the noisier it is.
    for _ in range(_TURNS):
        splits = splits_of(scales, kernels, priors, simulation, noise)
        noise = most_likely_noise([one for one in splits if one.collectives > 0], priors)
        if noise is None:
            break
    return noise


def most_likely_noise(splits: Sequence[Split], priors: Priors) -> float | None:
    """What is not shared by steps is the noise of collectives, which grows as the program says, or
    the step's own, the same at each scale. Either has a prior: log-normal, and half-Cauchy, as a
    step may have much more of it than most. Scales differ by more than chance.
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
        # The logarithm of a variance is off by twice that of a deviation.
        error = 2 / one.num_steps + (2 * priors.collective_scale.deviation) ** 2
        cost = cost + np.log(one.alone / predicted) ** 2 / (2 * error)
    best, _ = np.unravel_index(np.argmin(cost), cost.shape)
    return float(noise[best, 0])


def alone(observed: Observed, spread: float, priors: Priors) -> float:
    """The variance that a step does not share with the next, of the core's spread; what is shared
    is not seen in few steps, and leans on other systems.
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
    """By steps of two noises, between which variances are taken to be linear in the square of the
    noise: those `about` one, by default the usual.
    """
    about = float(np.exp(priors.collective_noise.mean)) if about is None else about
    noises = about * np.array([0.7, 1.2])
    noisy = [
        (scale.job, _with_laws(one, with_noise(one, noise)))
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


def _with_laws(kernels: Kernels, laws: Sequence[Variation]) -> Kernels:
    known = replace_variations(kernels.variability, laws)
    return msgspec.structs.replace(kernels, variability=known)
