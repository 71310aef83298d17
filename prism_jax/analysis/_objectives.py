"""Figures of the law of the step time that one may want to lower."""

import abc
import statistics
from typing import ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Float

from .._misc import quoted


Steps = Float[np.ndarray, " steps"]

# The share of the steps beyond a figure, on either side, whose spacing gives the bandwidth.
_NEAR = 0.2


class AbstractObjective(eqx.Module):
    """A figure of the law of the step time, and its derivatives.

    All methods take simulated step times in seconds, in float64 on the host. The defaults of the
    attributes are right for a figure in seconds about which nothing else is known.

    **Attributes:**

    - `unit`: the unit of the figure: `"s"` for seconds, `"1"` for a probability.
    - `monotone`: whether slower steps never lower the figure.
    - `share`: the share of the steps that the figure rests on, such as those beyond a quantile.
    - `exceeds`: the threshold in seconds, if the figure is the probability that a step takes
        longer; else `None`. Such a figure is computed without indicator functions: see
        `Exceedance`.
    - `level`: the level in (0, 1), if the figure is a quantile; else `None`. Its derivative is that
        of the probability that a step takes longer, over the density, where both are known without
        smoothing over steps: see `Exceedance`.
    """

    unit: ClassVar[str] = "s"
    monotone: ClassVar[bool] = False
    share: ClassVar[float] = 1.0
    exceeds: ClassVar[float | None] = None
    level: ClassVar[float | None] = None

    def __str__(self) -> str:  # Its name in tables and notes, such as `p95`.
        return type(self).__name__.lower()

    @abc.abstractmethod
    def value(self, steps: Steps) -> float:
        """The figure itself."""

    @abc.abstractmethod
    def slope(self, steps: Steps, width: float) -> Steps:
        """The derivative of the figure with respect to each step time (the pathwise estimator). For
        quantiles and probabilities it is averaged over nearby steps by a Gaussian kernel with a
        bandwidth of `width` seconds.
        """

    @abc.abstractmethod
    def influence(self, steps: Steps, width: float) -> Steps:
        """The derivative of the figure with respect to the weight of each step, times the number of
        steps, with densities averaged as in `slope`. Its mean is zero; its spread gives the
        standard error.
        """


class Mean(AbstractObjective):
    """The mean step time, in seconds."""

    monotone = True

    def value(self, steps: Steps) -> float:
        return float(np.mean(steps))

    def slope(self, steps: Steps, width: float) -> Steps:
        return np.full(len(steps), 1 / len(steps))

    def influence(self, steps: Steps, width: float) -> Steps:
        return steps - np.mean(steps)


class Std(AbstractObjective):
    """The standard deviation of the step time, in seconds."""

    def value(self, steps: Steps) -> float:
        return float(np.std(steps))

    def slope(self, steps: Steps, width: float) -> Steps:
        std = np.std(steps)
        if std == 0:
            return np.zeros(len(steps))
        return (steps - np.mean(steps)) / (std * len(steps))

    def influence(self, steps: Steps, width: float) -> Steps:
        std = np.std(steps)
        if std == 0:
            return np.zeros(len(steps))
        return ((steps - np.mean(steps)) ** 2 - std**2) / (2 * std)


class AbstractAtQuantile(AbstractObjective):
    """A figure of the steps at a quantile, or beyond it."""

    monotone = True
    q: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        if isinstance(self.q, bool) or not isinstance(self.q, int | float | np.number):
            raise ValueError(
                f"The quantile `q={quoted(self.q)}` must be a number, such as 0.95 for p95."
            )
        if not 0 < self.q < 1:
            raise ValueError(f"The quantile `q={self.q}` must lie between 0 and 1.")


class Quantile(AbstractAtQuantile):
    """The quantile of the step time at `q`, in seconds.

    Its derivative is that of the probability that a step takes longer, over the density there (see
    `Exceedance`). Where neither the step factor nor the tail varies, it is the mean derivative of
    the steps at the quantile, by local linear regression on nearby steps. The derivative of a
    single order statistic does not converge (Hong, "Estimating quantile sensitivities", 2009), and
    a plain mean over nearby steps is biased towards the side with more steps.
    """

    def __str__(self) -> str:
        return f"p{100 * self.q:.12g}"

    @property
    def share(self) -> float:
        return min(self.q, 1 - self.q)

    @property
    def level(self) -> float:
        return self.q

    def value(self, steps: Steps) -> float:
        return float(np.quantile(steps, self.q))

    def slope(self, steps: Steps, width: float) -> Steps:
        return regression_at(steps, self.value(steps), width)

    def influence(self, steps: Steps, width: float) -> Steps:
        at = self.value(steps)
        # In a gap between steps the corrected density is zero, and the other may underflow.
        least = max(density_at(steps, at, width), float(np.finfo(float).tiny))
        density = density_at(steps, at, width, corrected=True) or least
        below = steps <= at
        return (np.mean(below) - below) / density


class CVaR(AbstractAtQuantile):
    """The mean of the step times beyond the quantile at `q`, in seconds (conditional value at risk,
    expected shortfall). Of the tail objectives, it is the best behaved under optimisation.
    """

    def __str__(self) -> str:
        return f"cvar{100 * self.q:.12g}"

    @property
    def share(self) -> float:
        return 1 - self.q

    def value(self, steps: Steps) -> float:
        at = np.quantile(steps, self.q)
        return float(at + np.mean(np.maximum(steps - at, 0)) / self._beyond(steps))

    def _beyond(self, steps: Steps) -> float:
        """The share of the steps that count; at least the slowest step."""
        return max(1 - self.q, 1 / len(steps))

    def slope(self, steps: Steps, width: float) -> Steps:
        beyond = steps >= np.quantile(steps, self.q)
        return beyond / np.sum(beyond)

    def influence(self, steps: Steps, width: float) -> Steps:
        at = np.quantile(steps, self.q)
        contribution = np.maximum(steps - at, 0) / self._beyond(steps)
        return contribution - np.mean(contribution)


class Exceedance(AbstractObjective):
    """The probability that a step takes longer than `threshold` seconds.

    The pathwise derivative of an indicator function is zero, which is wrong for its mean. So
    `estimate` averages the conditional probability given all draws except the last, which is the
    step factor or the tail. Where neither varies, the derivative is the density of the steps at the
    threshold times the mean derivative of the steps there, as in `Quantile`.
    """

    unit = "1"
    monotone = True
    threshold: float = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0 < self.threshold < float("inf"):
            raise ValueError(f"The threshold of {self.threshold} s must be a positive step time.")

    def __str__(self) -> str:
        return f"P(> {self.threshold:g} s)"

    @property
    def exceeds(self) -> float:
        return self.threshold

    def value(self, steps: Steps) -> float:
        return float(np.mean(steps > self.threshold))

    def slope(self, steps: Steps, width: float) -> Steps:
        density = density_at(steps, self.threshold, width, corrected=True)
        return density * regression_at(steps, self.threshold, width)

    def influence(self, steps: Steps, width: float) -> Steps:
        above = steps > self.threshold
        return above - np.mean(above)


def bandwidth(steps: Steps, objective: AbstractObjective, number: float | None = None) -> float:
    """The bandwidth, in seconds, of the Gaussian kernels below, for a figure (Silverman, "Density
    estimation for statistics and data analysis", 1986, eq. 3.31). It follows from the spacing of
    the steps about the figure: neither long tails nor further modes widen it.

    **Arguments:**

    - `number`: how many independent steps they are worth; by default, all of them.
    """
    low, high = np.quantile(steps, [0.25, 0.75])
    std = float(np.std(steps))
    width = min(std, float(high - low) / 1.349) if high > low else std
    level = objective.level
    if objective.exceeds is not None:
        level = float(np.mean(steps <= objective.exceeds))
    if level is not None and 0 < level < 1:
        # That of the normal law whose quantiles are as far apart there, on the closer side.
        levels = level + _NEAR * min(level, 1 - level) * np.array([-1, 0, 1])
        scores = [*map(statistics.NormalDist().inv_cdf, levels)]
        apart = float(np.min(np.diff(np.quantile(steps, levels)) / np.diff(scores)))
        width = min(width, apart) if apart > 0 else width
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
