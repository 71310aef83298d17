"""The law of a step on systems of which nothing is known."""

import numpy as np
from jaxtyping import Float

from ..data import Priors, Sampled
from ._step_law import StepLaw


# No system had so many outliers; beyond, they are not outliers.
_MOST = 0.2


def laws_of_systems(priors: Priors, device: str, number: int) -> list[StepLaw]:
    """The laws of steps of so many systems, drawn with a constant key.

    Spreads are log-normal, by the generation of the device where systems of it were seen; so are
    shares of outliers; what an outlier takes follows the spread, and is less where there are many.
    Of few systems the law is known by as much less well: draws are of Student's law.
    """
    rng = np.random.default_rng(0)
    spreads = np.exp(_drawn(spread_of_device(priors, device), rng, number))
    shares = _drawn(priors.system_shares, rng, number)
    excess = priors.system_excess
    logs = excess.mean + excess.slope * (shares - priors.system_shares.mean)
    logs = logs + excess.deviation * rng.standard_normal(number)
    columns = (spreads, np.minimum(np.exp(shares), _MOST), spreads * np.exp(logs))
    width = priors.outlier_spread.value
    return [
        StepLaw(float(spread), float(share), float(excess), width)
        for spread, share, excess in zip(*columns, strict=True)
    ]


def spread_of_device(priors: Priors, device: str) -> Sampled:
    """The law of the logarithm of the spread of the core of systems with this device."""
    (other,) = (one for one in priors.system_spreads if not one.devices)
    mine = (one for one in priors.system_spreads if device in one.devices)
    return next(mine, other)


def _drawn(law: Sampled, rng: np.random.Generator, number: int) -> Float[np.ndarray, " number"]:
    """What another system has, of a normal law of which mean and deviation were estimated."""
    return law.mean + law.deviation * np.sqrt(1 + 1 / law.number) * rng.standard_t(
        law.number - 1, number
    )
