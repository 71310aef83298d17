"""Standard errors of the figures of a law."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .._estimate import reaches
from .._misc import bisect
from ._compared import AbstractCompared


# Levels at which the standard error of the distribution function is kept; between them, its ratio
# to sqrt(q (1 - q)) is interpolated.
_LOWER = np.array([1e-4, 1e-3, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.35])
LEVELS = np.concatenate([_LOWER, [0.5], 1 - _LOWER[::-1]])
# The share of the steps beyond each of them.
SHARES = np.minimum(LEVELS, 1 - LEVELS)
_BINOMIAL = np.sqrt(LEVELS * (1 - LEVELS))
# With fewer independent replica samples than this beyond a quantile, its interval is not known.
FEWEST = 20
# Of a range of levels; what is left is as good as straight.
_HALVINGS = 20


def more_steps(support: float, noun: str = "steps") -> str:
    """How many more steps a standard error needs that rests on so many independent samples."""
    if support < 1:  # No sample says how many.
        return f"far more {noun}, or ask for what is less far out"
    return f"about {math.ceil(FEWEST / support):,} times as many {noun}"


@dataclasses.dataclass(frozen=True, eq=False)
class Errors(AbstractCompared):
    """Standard errors of the figures of a law, and the number of independent replica samples from
    which they were estimated.

    **Attributes:**

    - `mean`, `std`: the standard errors of the mean and of the standard deviation, in seconds.
    - `mean_skewness`, `std_skewness`: the skewness of these two estimators.
    - `mean_degrees`, `std_degrees`: the degrees of freedom of these two standard errors.
    - `support`: how many independent replica samples, or allocations, the steps come from.
    - `levels`: the standard error of the distribution function at each quantile of a fixed list of
        levels.
    - `level_skewness`, `level_degrees`: the skewness of that estimator, and the degrees of freedom
        of its standard error, at each of these quantiles.
    - `level_support`: how many independent replica samples, or allocations, lie above or below
        each of these quantiles, whichever are fewer.
    """

    mean: float
    std: float
    mean_skewness: float
    std_skewness: float
    mean_degrees: float
    std_degrees: float
    support: float
    levels: np.ndarray
    level_skewness: np.ndarray
    level_degrees: np.ndarray
    level_support: np.ndarray

    @property
    def known(self) -> bool:
        """Whether there are enough independent replica samples to know the standard errors."""
        return self.support >= FEWEST

    def of_level(self, q: float) -> tuple[float, float]:
        """The standard error of the distribution function at the quantile at `q`, and the skewness
        of its estimator.
        """
        there = math.sqrt(q * (1 - q))
        if there == 0:
            return 0.0, 0.0
        error = float(np.interp(q, LEVELS, self.levels / _BINOMIAL)) * there
        return error, float(np.interp(q, LEVELS, self.level_skewness * _BINOMIAL)) / there

    def interval_levels(self, q: float, level: float) -> tuple[float, float]:
        """The two levels whose quantiles are the ends of a confidence interval for the quantile at
        `q`: those at which the interval of the distribution function ends at `q`.
        """
        inverse = float(np.interp(q, LEVELS, SHARES / self.level_degrees)) / min(q, 1 - q)
        degrees = 1 / inverse if inverse > 0 else float("inf")

        def reached(p: float, side: int) -> float:
            error, skewness = self.of_level(p)
            return p + (-1, 1)[side] * reaches(level, degrees, skewness)[side] * error - q

        def end(side: int) -> float:
            # An interval of a small confidence level may lie on one side of a skewed estimate.
            low, high = (0.0, q) if reached(q, side) >= 0 else (q, 1.0)
            # To import SciPy's solvers takes longer than all figures.
            low, high = bisect(lambda p: not reached(p, side) >= 0, low, high, _HALVINGS)
            below, above = reached(low, side), reached(high, side)
            return high - (high - low) * above / (above - below) if above > below else high

        return end(1), end(0)

    def support_beyond(self, q: float) -> float:
        """How many independent replica samples lie beyond the quantile at `q`."""
        # Support falls towards the tails about as the share beyond does.
        support = float(np.interp(q, LEVELS, self.level_support / SHARES)) * min(q, 1 - q)
        return round(support, 9)  # Beyond p90 of 200 samples are 20, although 1 - 0.9 is below 0.1.


def scatters(
    contributions: Float[np.ndarray, "groups figures"], most_skewness: float = math.inf
) -> Float[np.ndarray, "figures 3"]:
    """The scatter of figures from what each group of samples adds to them: the standard error, its
    skewness, and the degrees of freedom of the standard error, which is itself an estimate.

    The sum of fourth powers is the variance of the sum of squares. The part of it that is
    correlated with the estimate is skewness; the rest is noise of the standard error.
    """
    squares, cubes, fourths = (np.sum(contributions**power, axis=0) for power in (2, 3, 4))
    scatter = np.tile([0.0, 0.0, np.inf], (len(squares), 1))
    positive = squares > 0
    squares, cubes, fourths = squares[positive], cubes[positive], fourths[positive]
    skewness, noise = cubes / squares**1.5, fourths - cubes**2 / squares
    # The more of the scatter few groups hold, the less is known of it.
    degrees = np.full_like(squares, len(contributions) - 1)
    np.divide(2 * squares**2, noise, out=degrees, where=2 * squares**2 < degrees * noise)
    skewness = np.clip(skewness, -most_skewness, most_skewness)
    scatter[positive] = np.column_stack([np.sqrt(squares), skewness, degrees])
    return scatter


def errors_of_figures(
    scatter: Float[np.ndarray, "figures 3"], support: float, level_support: np.ndarray
) -> Errors:
    """The errors of a law from the `scatters` of its mean, of its standard deviation, and of the
    distribution function at each of `LEVELS`. The rest is as in [`Errors`][].
    """
    (mean, std), (error, skewness, degrees) = scatter[:2].tolist(), scatter[2:].T
    moments = mean[0], std[0], mean[1], std[1], mean[2], std[2]
    return Errors(*moments, support, error, skewness, degrees, level_support)


def pooled_errors(errors: Sequence[Errors], shares: np.ndarray) -> Errors:
    """The errors of several independent laws together. Each law has a share of the steps."""
    error, skewness, degrees = np.moveaxis(np.array([_scatters(of_law) for of_law in errors]), 1, 0)
    error = shares[:, None] * error
    third = np.sum(error**3 * skewness, axis=0)
    # Half the variance of the square of it, by Welch and Satterthwaite.
    fourth = np.sum(error**4 / degrees, axis=0)
    error = np.sqrt(np.sum(error**2, axis=0))
    positive = error > 0
    skewness = np.divide(third, error**3, out=np.zeros_like(error), where=positive)
    degrees = np.divide(error**4, fourth, out=np.full_like(error, np.inf), where=fourth > 0)
    return errors_of_figures(
        np.column_stack([error, skewness, degrees]),
        sum(of_law.support for of_law in errors),
        np.sum([of_law.level_support for of_law in errors], axis=0),
    )


def _scatters(errors: Errors) -> np.ndarray:
    """The standard error of each figure, its skewness, and its degrees of freedom."""
    return np.array(
        [
            [errors.mean, errors.std, *errors.levels],
            [errors.mean_skewness, errors.std_skewness, *errors.level_skewness],
            [errors.mean_degrees, errors.std_degrees, *errors.level_degrees],
        ]
    )
