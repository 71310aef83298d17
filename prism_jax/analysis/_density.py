"""Kernel smoothing around a step time: the density there, and the local mean of a value."""

import numpy as np
from jaxtyping import Float


Steps = Float[np.ndarray, " steps"]


def bandwidth(steps: Steps, number: float | None = None) -> float:
    """The bandwidth, in seconds, of the Gaussian kernels below (Silverman, "Density estimation for
    statistics and data analysis", 1986, eq. 3.31). Long tails do not widen it.

    **Arguments:**

    - `number`: how many independent steps they are worth; by default, all of them.
    """
    low, high = np.quantile(steps, [0.25, 0.75])
    std = float(np.std(steps))
    width = min(std, float(high - low) / 1.349) if high > low else std
    return 0.9 * width * (number or len(steps)) ** -0.2


def density_at(steps: Steps, at: float, width: float, *, corrected: bool = False) -> float:
    """The density of the steps at `at`, per second, with a kernel of bandwidth `width`. With
    `corrected`, the bias is of fourth order in the bandwidth instead of second (Wand and Jones,
    "Kernel smoothing", 1995, section 2.8), and the standard error is a third larger. Where the
    corrected density would be negative, far out, it is zero.
    """
    if width == 0:
        return float(np.mean(steps == at))
    squared = ((steps - at) / width) ** 2
    kernel = np.exp(-0.5 * squared)
    if corrected:
        kernel *= (3 - squared) / 2
    return max(float(np.mean(kernel)), 0) / (width * np.sqrt(2 * np.pi))


def regression_at(steps: Steps, at: float, width: float) -> Steps:
    """The weight of each step in a local linear regression at `at`, with a kernel of bandwidth
    `width` (Fan and Gijbels, "Local polynomial modelling and its applications", 1996, eq. 3.11).
    """
    distance = np.abs(steps - at)
    distance = distance / width if width > 0 else np.where(distance > 0, np.inf, 0)
    nearest = np.min(distance)
    if not np.isfinite(nearest):  # All steps are equal, and far from `at`.
        return np.zeros(len(steps))
    weights = np.exp(-0.5 * (distance**2 - nearest**2))
    weights /= np.sum(weights)
    away = steps - at
    first, second = np.sum(weights * away), np.sum(weights * away**2)
    spread = second - first**2
    if spread <= 1e-3 * second:  # All nearby steps lie on one side.
        return weights
    return weights * (second - first * away) / spread
