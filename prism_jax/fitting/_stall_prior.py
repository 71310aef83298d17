"""What is known of stalls before any are seen: of slow steps of other systems."""

import numpy as np
from jaxtyping import Float

from ..data import load_priors


def stall_share(number: int, steps: int) -> float:
    """The share of steps that have a stall, where `number` of `steps` had: the posterior mean."""
    prior = load_priors().outlier_share
    return (number + prior.value * prior.observations) / (steps + prior.observations)


def size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few of them, mostly that of the prior."""
    prior, logs = load_priors().outlier_spread, np.log(sizes)
    squares = prior.observations * prior.value**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (prior.observations + len(logs) - 1)))
