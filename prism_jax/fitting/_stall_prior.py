"""What is known of stalls before any are seen."""

import numpy as np
from jaxtyping import Float


# The share of slow outliers in the logs of 15 systems of MLPerf Training v3.0 to v5.1 (MLCommons,
# Apache-2.0; 256 to 6,144 GPUs) is 0.1 to 7 %, 2.1 % on average with a standard deviation of 2.1 %.
# A gamma law of these moments has this shape, and weighs as much as so many steps.
_SHAPE = 1.08
_STEPS = 50.7
# The logarithm of a stall's size spreads by this, with the weight of two stalls.
_SIZE_SIGMA = 0.5


def stall_share(number: int, steps: int) -> float:
    """The share of steps that have a stall, where `number` of `steps` had: the posterior mean."""
    return (number + _SHAPE) / (steps + _STEPS)


def size_spread(sizes: Float[np.ndarray, " stalls"]) -> float:
    """The spread of the logarithm of a stall's size; with few of them, mostly that of the prior."""
    logs = np.log(sizes)
    squares = 2 * _SIZE_SIGMA**2 + np.sum((logs - logs.mean()) ** 2)
    return float(np.sqrt(squares / (1 + len(logs))))
