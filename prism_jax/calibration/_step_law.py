"""The law of the factor of a step: its spread, and slow outliers."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .._misc import bisect
from ..data import Kernels, Priors, Variation
from ._observe import Observed, core_spread


# The body may be this much wider than the core, which leaves out steps that are far off.
_WIDER = 1.25
_HALVINGS = 14
# The names of the parameters in files.
_NAMES = ("sigma", "outlier_share", "outlier_excess", "outlier_sigma")


@dataclasses.dataclass(frozen=True)
class StepLaw:
    """The law of the factor that all ops of a step share, relative to the median; see `Outlying`.

    **Attributes:**

    - `sigma`: the spread of the body.
    - `share`, `excess`, `outlier_sigma`: the parameters of outliers.
    """

    sigma: float
    share: float
    excess: float
    outlier_sigma: float

    def factors(self, number: int) -> Float[np.ndarray, " number"]:
        """`number` factors of mean one, evenly spaced in probability, in a fixed shuffled order."""
        slow = round(self.share * number)
        parts = [np.exp(self.sigma * _scores(number - slow))]
        parts.append(1 + self.excess * np.exp(self.outlier_sigma * _scores(slow)))
        factors = np.concatenate(parts)
        return np.random.default_rng(0).permutation(factors / factors.mean())

    def variation(self, source: str) -> Variation:
        """The law as it is written to a file."""
        parameters: dict[str, float] = dict(zip(_NAMES, dataclasses.astuple(self), strict=True))
        return Variation("", "step", "lognormal-outliers", parameters, source)


def _scores(number: int) -> Float[np.ndarray, " number"]:
    from scipy.special import ndtri

    return ndtri((np.arange(number) + 0.5) / max(number, 1))


def step_law_of(kernels: Kernels) -> StepLaw:
    """The law that the kernels of a calibrated job have."""
    variation = kernels.find_variation("step")
    assert variation is not None
    return StepLaw(*(variation.parameters[name] for name in _NAMES))


def spread_of(observed: Observed, priors: Priors) -> float:
    """The spread of the core, shrunk in its logarithm towards that of other systems."""
    worth = priors.step_spread
    logs = np.log([observed.core, worth.value])
    return float(np.exp(np.average(logs, weights=[observed.num_steps, worth.observations])))


def law_of_outliers(all_observed: Sequence[Observed], spread: float, priors: Priors) -> StepLaw:
    """The law of outliers, from those of all runs and of other systems. Its body has no spread yet.

    The share of outliers, and their excess relative to the step, are the same for all scales of a
    job: in MLPerf's families, neither depends on the number of GPUs.
    """
    number = sum(observed.num_steps for observed in all_observed)
    relative = [observed.excess / observed.median for observed in all_observed]
    logs = np.log(np.concatenate(relative))
    known, usual, width = priors.outlier_share, priors.outlier_excess, priors.outlier_spread

    def mean(prior: float, worth: float, total: float, number: int) -> float:
        """The mean of observations, with a prior that counts as some observations."""
        return (total + worth * prior) / (number + worth)

    share = mean(known.value, known.observations, len(logs), number)
    prior = float(np.log(usual.value * spread))
    centre = mean(prior, usual.observations, float(np.sum(logs)), len(logs))
    squares = float(np.sum((logs - centre) ** 2))
    variance = mean(width.value**2, width.observations, squares, len(logs))
    return StepLaw(0.0, share, float(np.exp(centre)), float(np.sqrt(variance)))


def solve_spread(
    law: StepLaw,
    deviations: Sequence[Float[np.ndarray, " samples"]],
    wanted: Sequence[float],
    weights: Sequence[float],
) -> tuple[float, float]:
    """The spread of the body with which the cores have the wanted spreads.

    **Arguments:**

    - `law`: the law, of which the outliers are used.
    - `deviations`: for each scale, the relative deviations from the median of steps that differ
        only by the noise of kernels.
    - `wanted`, `weights`: the wanted spread of the core at each scale, and its weight.

    **Returns:**

    The spread, and a factor for the noise of kernels. It is below one only if this noise alone is
    too wide; the body then has no spread.
    """
    goal = float(np.average(np.square(wanted), weights=weights))

    def is_narrow(sigma: float, less: float) -> bool:
        factors = dataclasses.replace(law, sigma=sigma).factors(len(deviations[0]))
        cores = [core_spread((1 + less * one) * factors) ** 2 for one in deviations]
        return float(np.average(cores, weights=weights)) <= goal

    if not is_narrow(0.0, 1.0):
        return 0.0, sum(bisect(lambda less: is_narrow(0.0, less), 0.0, 1.0, _HALVINGS)) / 2
    widest = float(np.sqrt(goal)) * _WIDER
    return sum(bisect(lambda sigma: is_narrow(sigma, 1.0), 0.0, widest, _HALVINGS)) / 2, 1.0
