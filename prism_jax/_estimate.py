"""Figures with their standard errors; and statistics of values of which some are `nan` or far from
the others: means, typical values and outliers.
"""

import dataclasses
import math
import statistics

import numpy as np
from jaxtyping import Bool, Float


# A latency this many robust standard deviations above the median of its worker has stalled.
_STALL_DEVIATIONS = 8.0
# A step this many robust standard deviations from the median is outside of the core.
_CORE_DEVIATIONS = 5.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimated figure and its standard error, in the same unit.

    **Attributes:**

    - `value`: the figure.
    - `standard_error`: the standard error of the figure; `nan` if it is not known.
    - `degrees`: the degrees of freedom of the standard error, which are few if it comes from few
        groups or samples.
    - `skewness`: the skewness of the estimator; unless it is zero, the confidence interval reaches
        further on the side of the longer tail.
    """

    value: float
    standard_error: float
    degrees: float = math.inf
    skewness: float = 0.0

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two ends of a confidence interval; both are `nan` if the standard error is not known.

        **Raises:**

        `ValueError` if `level` is not between 0 and 1.
        """
        reach = deviations(level, self.degrees)
        too_high = skewed(np.array([reach, -reach]), np.full(2, self.skewness))
        low, high = (self.value - too_high * self.standard_error).tolist()
        return low, high

    def __str__(self) -> str:
        text = rounded(self.value, self.standard_error)
        if math.isnan(self.standard_error):
            return text
        return f"{text} +- {rounded(self.standard_error, self.standard_error)}"


def rounded(value: float, error: float) -> str:
    """A number with the digits that its error supports: down to the error's first digit, or its
    second if the first is 1 or 2. Without an error that is known and positive, five digits; a dash
    for `nan`.
    """
    if math.isnan(value):
        return "-"
    if not (0 < error < math.inf and math.isfinite(value)):
        return f"{value:.5g}"
    places = -math.floor(math.log10(error / 3))
    if -15 < places < 8:
        return f"{round(value, places):.{max(places, 0)}f}"
    digits = math.floor(math.log10(max(abs(value), error))) + 1 + places
    return f"{value:.{digits}g}"


def deviations(level: float, degrees: float) -> float:
    """How many standard errors a confidence interval reaches from a symmetric estimate, by
    Student's t.

    **Arguments:**

    - `level`: the probability that the interval should have.
    - `degrees`: the degrees of freedom of the standard error.
    """
    if not 0 < level < 1:
        raise ValueError(f"The confidence level {level} must lie between 0 and 1.")
    if math.isinf(degrees):
        return statistics.NormalDist().inv_cdf((1 + level) / 2)
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def skewed(
    symmetric: Float[np.ndarray, "..."], skewness: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """By how many standard errors an estimate is too high where a symmetric one would be so by
    `symmetric`: ends of a confidence interval, from `deviations`.

    If an estimator has a long upper tail, its standard error is small where the estimate is low, so
    a symmetric interval nearly always errs on the same side. The studentised estimate is therefore
    transformed to a symmetric law (Hall, "On the removal of skewness by transformation", 1992).

    **Arguments:**

    - `skewness`: the skewness of the estimator.
    """
    is_skewed = np.abs(skewness) >= 1e-6
    there = np.where(is_skewed, skewness, 1.0)
    bent = (np.cbrt(1 + there * (symmetric - there / 6)) - 1) * 3 / there
    return np.where(is_skewed, bent, symmetric)


def typical(
    values: Float[np.ndarray, "..."], axes: tuple[int, ...]
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """The median along some axes, which are kept, and the robust standard deviation; zeros if all
    values are `nan`.
    """
    present = ~np.isnan(values).all(axis=axes, keepdims=True)  # A median of nothing is a warning.
    centre = np.nanmedian(np.where(present, values, 0), axis=axes, keepdims=True)
    distance = np.where(present, np.abs(values - centre), 0)
    return centre, 1.4826 * np.nanmedian(distance, axis=axes, keepdims=True)


def stalled(
    values: Float[np.ndarray, "..."], axes: tuple[int, ...], least: float
) -> Bool[np.ndarray, "..."]:
    """Which values are far above the median along some axes, and above it by more than `least`."""
    centre, deviation = typical(values, axes)
    return values - centre > np.maximum(_STALL_DEVIATIONS * deviation, least)


def in_core(steps: Float[np.ndarray, " steps"]) -> Bool[np.ndarray, " steps"]:
    """Which steps are in the core: within five robust standard deviations of the median."""
    centre, deviation = typical(steps, (0,))
    return np.abs(steps - centre) <= _CORE_DEVIATIONS * deviation


def mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of the present values; zero if there are none. The axes are kept."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The number of present values. The axes are kept."""
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)


def slope_of(y: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """The slope of the line of least squares of `y` over `x`, and its standard error."""
    along, off = x - x.mean(), y - y.mean()
    square = float(along @ along)
    slope = float(along @ off) / square
    residual = float(np.sum((off - slope * along) ** 2)) / (len(y) - 2)
    return slope, float(np.sqrt(residual / square))
