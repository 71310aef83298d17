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
    """

    value: float
    standard_error: float
    degrees: float = math.inf

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two ends of a confidence interval; `nan` twice where the error is not known.

        **Raises:**

        `ValueError` for a level that does not lie between 0 and 1.
        """
        half = half_width(level, self.degrees) * self.standard_error
        return self.value - half, self.value + half

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
