"""The law of a step on systems without measurements."""

import numpy as np
from jaxtyping import Float

from ..data import Priors, Sampled
from ._step_law import StepLaw


# The largest share of outliers, which is above that of any measured system.
_MOST = 0.2


def laws_of_systems(priors: Priors, device: str, number: int) -> list[StepLaw]:
    """The laws of steps of `number` systems, drawn with a constant key.

    Spreads are log-normal, with parameters for the generation of the device if systems with it were
    measured. Shares of outliers are log-normal too. The excess of an outlier is relative to the
    spread, and smaller if outliers are frequent. Because the parameters come from few systems,
    draws follow Student's law.
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
    """Values of further systems, if the mean and the deviation of a normal law were estimated."""
    return law.mean + law.deviation * np.sqrt(1 + 1 / law.number) * rng.standard_t(
        law.number - 1, number
    )
