"""Priors of stalls, from slow steps of other systems."""

import numpy as np
from jaxtyping import Float

from ..data import load_priors


def stall_share(number: int, steps: int) -> float:
    """The posterior mean of the share of steps with a stall, if `number` of `steps` had one."""
    prior = load_priors().outlier_share
    return (number + prior.value * prior.observations) / (steps + prior.observations)


def size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few stalls, mostly that of the prior."""
    prior, logs = load_priors().outlier_spread, np.log(sizes)
    squares = prior.observations * prior.value**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (prior.observations + len(logs) - 1)))
