"""A figure with its standard error."""

import dataclasses
import math
import statistics


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure that was estimated, and how wrong it may be; all in one unit.

    **Attributes:**

    - `value`: the figure.
    - `standard_error`: `nan` where it is not known.
    - `degrees`: of freedom of the standard error; few where it comes from a few batches.
    - `skewness`: of the figure's scatter; where it is not zero, the interval reaches further to the
      side of the longer tail.
    """

    value: float
    standard_error: float
    degrees: float = math.inf
    skewness: float = 0.0

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two ends of a confidence interval; `nan` twice where the error is not known.

        **Raises:**

        `ValueError` for a level that does not lie between 0 and 1.
        """
        below, above = reaches(level, self.degrees, self.skewness)
        return self.value - below * self.standard_error, self.value + above * self.standard_error

    def __str__(self) -> str:
        if math.isnan(self.standard_error):
            return f"{self.value:.6g}"
        return f"{self.value:.6g} +- {self.standard_error:.2g}"


def half_width(level: float, degrees: float = math.inf) -> float:
    """How many standard errors a confidence interval reaches to each side: Student's t."""
    if not 0 < level < 1:
        raise ValueError(f"The confidence level {level} must lie between 0 and 1.")
    if math.isinf(degrees):
        return statistics.NormalDist().inv_cdf((1 + level) / 2)
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def reaches(level: float, degrees: float, skewness: float) -> tuple[float, float]:
    """How many standard errors a confidence interval reaches below and above an estimate.

    The standard error of an estimate with a long upper tail is small where the estimate is low, and
    what lies beyond an interval of equal sides is nearly all above it. So the ratio of the two is
    transformed to a symmetric law (Hall, "On the removal of skewness by transformation", 1992).

    **Arguments:**

    - `level`, `degrees`: as of `half_width`.
    - `skewness`: of the estimate's scatter.
    """
    half = half_width(level, degrees)
    if abs(skewness) < 1e-6:
        return half, half
    ends = (1 + skewness * (x - skewness / 6) for x in (half, -half))
    below, above = ((math.cbrt(end) - 1) * 3 / skewness for end in ends)
    return below, -above
