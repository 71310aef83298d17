"""Figures of the law of the step time that one may want to lower."""

import abc
import math

import equinox as eqx
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from .._misc import FrozenArray
from ..engine import check_num_samples
from ._score import crps


Steps = Float[np.ndarray, " steps"]


class AbstractObjective(eqx.Module):
    """A figure of the law of the step time, and how it depends on the steps.

    All methods take composed steps in seconds, in float64 on the host.
    """

    @property
    def unit(self) -> str:
        """Of the figure: seconds, or `"1"` for a probability."""
        return "s"

    @property
    def monotone(self) -> bool:
        """Whether slower steps never make it less."""
        return True

    @abc.abstractmethod
    def value(self, steps: Steps) -> float:
        """The figure itself."""

    @abc.abstractmethod
    def slope(self, steps: Steps) -> Steps:
        """The derivative of the figure with respect to each step: the pathwise estimator, which
        for quantiles and probabilities is averaged over the steps nearby.
        """

    @abc.abstractmethod
    def influence(self, steps: Steps) -> Steps:
        """The derivative of the figure with respect to the weight of each step, times their number.
        Its mean is zero; its spread gives the standard error.
        """


class Mean(AbstractObjective):
    """The mean step time, in seconds."""

    def value(self, steps: Steps) -> float:
        return float(np.mean(steps))

    def slope(self, steps: Steps) -> Steps:
        return np.full(len(steps), 1 / len(steps))

    def influence(self, steps: Steps) -> Steps:
        return steps - np.mean(steps)


class Std(AbstractObjective):
    """The standard deviation of the step time, in seconds."""

    @property
    def monotone(self) -> bool:
        return False

    def value(self, steps: Steps) -> float:
        return float(np.std(steps))

    def slope(self, steps: Steps) -> Steps:
        std = np.std(steps)
        if std == 0:
            return np.zeros(len(steps))
        return (steps - np.mean(steps)) / (std * len(steps))

    def influence(self, steps: Steps) -> Steps:
        std = np.std(steps)
        if std == 0:
            return np.zeros(len(steps))
        return ((steps - np.mean(steps)) ** 2 - std**2) / (2 * std)


class Quantile(AbstractObjective):
    """The quantile of the step time at `q`, in seconds.

    Its derivative is that of the steps at the quantile, by local linear regression on the steps
    around it: one order statistic alone would never settle (Hong, "Estimating
    quantile sensitivities", 2009), and a mean of those around it would lean to where most are.
    """

    q: float = eqx.field(static=True)

    def __check_init__(self):
        _check_probability(self.q)

    def value(self, steps: Steps) -> float:
        return float(np.quantile(steps, self.q))

    def slope(self, steps: Steps) -> Steps:
        return _regression_at(steps, self.value(steps))

    def influence(self, steps: Steps) -> Steps:
        at = self.value(steps)
        density = _density(steps, at)
        below = steps <= at
        return (np.mean(below) - below) / density


class CVaR(AbstractObjective):
    """The mean of the step times beyond the quantile at `q`, in seconds (conditional value at risk;
    expected shortfall). The tail objective that is best behaved under optimisation.
    """

    q: float = eqx.field(static=True)

    def __check_init__(self):
        _check_probability(self.q)

    def value(self, steps: Steps) -> float:
        at = np.quantile(steps, self.q)
        return float(at + np.mean(np.maximum(steps - at, 0)) / self._beyond(steps))

    def _beyond(self, steps: Steps) -> float:
        """The share of the steps that count: the slowest at least."""
        return max(1 - self.q, 1 / len(steps))

    def slope(self, steps: Steps) -> Steps:
        beyond = steps >= np.quantile(steps, self.q)
        return beyond / np.sum(beyond)

    def influence(self, steps: Steps) -> Steps:
        at = np.quantile(steps, self.q)
        contribution = np.maximum(steps - at, 0) / self._beyond(steps)
        return contribution - np.mean(contribution)


class Exceedance(AbstractObjective):
    """The probability that a step takes longer than `threshold` seconds.

    The derivative of an indicator is zero, and wrong. So `estimate` takes the mean of the
    probability given all draws but the last, which is the step factor or the tail. Where neither
    varies, the derivative is the density at the threshold times that of the steps there, as in
    `Quantile`.
    """

    threshold: float = eqx.field(static=True)

    def __check_init__(self):
        if not 0 < self.threshold < float("inf"):
            raise ValueError(f"The threshold of {self.threshold} s must be a positive step time.")

    @property
    def unit(self) -> str:
        return "1"

    def value(self, steps: Steps) -> float:
        return float(np.mean(steps > self.threshold))

    def slope(self, steps: Steps) -> Steps:
        density = _density(steps, self.threshold, corrected=True)
        return density * _regression_at(steps, self.threshold)

    def influence(self, steps: Steps) -> Steps:
        above = steps > self.threshold
        return above - np.mean(above)


class CRPS(AbstractObjective):
    """The mean continuous ranked probability score of the law at measured step times, in seconds:
    `E|X - y| - E|X - X'| / 2`, the smaller the better. For fitting a law to what was measured.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """

    measured: FrozenArray = eqx.field(static=True)

    @property
    def monotone(self) -> bool:
        return False

    def __init__(self, measured: ArrayLike):
        self.measured = FrozenArray(np.sort(np.asarray(measured, float)))

    def __check_init__(self):
        values = self.measured.value
        if values.ndim != 1 or not len(values) or not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError("Measured steps must be a list of positive step times, in seconds.")

    def value(self, steps: Steps) -> float:
        return crps(np.sort(steps), self.measured.value)

    def slope(self, steps: Steps) -> Steps:
        # The distribution function of what was measured, less that of the steps; ties count half.
        return 2 * (_ranks(self.measured.value, steps) - _ranks(np.sort(steps), steps)) / len(steps)

    def influence(self, steps: Steps) -> Steps:
        away = _mean_distance(self.measured.value, steps) - _mean_distance(np.sort(steps), steps)
        return away - np.mean(away)


def check_objective(objective) -> None:
    """Raises a `ValueError` unless it is one."""
    if not isinstance(objective, AbstractObjective):
        raise ValueError(
            f"The objective {objective!r} must be one of `Mean()`, `Std()`, `Quantile(q)`, "
            "`CVaR(q)`, `Exceedance(threshold)` and `CRPS(measured)`."
        )


def check_reached(objective: AbstractObjective, value: float) -> None:
    """Raises a `ValueError` where a probability is zero or one: nothing would change it."""
    if objective.unit == "1" and not 0 < value < 1:
        raise ValueError(
            f"{objective!r} is {value:g}; give a threshold that some steps exceed and others do "
            "not."
        )


# Fewer steps beyond a quantile than these make it lean inwards.
_FEWEST_BEYOND = 3


def check_steps(objective: AbstractObjective, num_samples: int, num_batches: int = 1) -> None:
    """Raises a `ValueError` where so many steps, in batches, do not reach as far as the figure."""
    number = check_num_samples(num_samples) // num_batches
    match objective:
        case Quantile():
            share = min(objective.q, 1 - objective.q)
        case CVaR():
            share = 1 - objective.q
        case _:
            return
    if share * number < _FEWEST_BEYOND:
        raise ValueError(
            f"{number:,} steps (of a batch) do not reach as far as {objective!r}, beyond which "
            f"{_FEWEST_BEYOND} should lie; raise `num_samples` "
            f"{math.ceil(_FEWEST_BEYOND / share / max(number, 1))}-fold."
        )


def _ranks(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The share of `ordered` below each of `at`."""
    sides = [np.searchsorted(ordered, at, side) for side in ("left", "right")]
    return (sides[0] + sides[1]) / (2 * len(ordered))


def _mean_distance(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The mean distance of each of `at` from all of `ordered`."""
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, at)
    return (at * (2 * below - len(ordered)) + total[-1] - 2 * total[below]) / len(ordered)


def _check_probability(q: float) -> None:
    if not 0 < q < 1:
        raise ValueError(f"The quantile `q={q}` must lie between 0 and 1.")


def bandwidth(steps: Steps) -> float:
    """Half the width, in seconds, of the kernels below (Silverman, "Density estimation for
    statistics and data analysis", 1986, eq. 3.31), which tails do not widen.
    """
    low, high = np.quantile(steps, [0.25, 0.75])
    std = float(np.std(steps))
    width = min(std, float(high - low) / 1.349) if high > low else std
    return 0.9 * width * len(steps) ** -0.2


def _density(steps: Steps, at: float, *, corrected: bool = False) -> float:
    """The density of the steps at `at`, per second. Corrected, its bias is of fourth order in the
    bandwidth in place of second (Wand and Jones, "Kernel smoothing", 1995, section 2.8), and it
    scatters by a third more; far out, where it would be negative, it is zero.
    """
    width = bandwidth(steps)
    if width == 0:
        return float(np.mean(steps == at))
    squared = ((steps - at) / width) ** 2
    kernel = np.exp(-0.5 * squared)
    if corrected:
        kernel *= (3 - squared) / 2
    return max(float(np.mean(kernel)), 0) / (width * np.sqrt(2 * np.pi))


def _regression_at(steps: Steps, at: float) -> Steps:
    """The weights with which values of the steps give their local linear regression at `at` (Fan
    and Gijbels, "Local polynomial modelling and its applications", 1996, eq. 3.11).
    """
    width = bandwidth(steps)
    distance = np.abs(steps - at)
    distance = distance / width if width > 0 else np.where(distance > 0, np.inf, 0)
    nearest = np.min(distance)
    if not np.isfinite(nearest):  # All steps are equal, and elsewhere.
        return np.zeros(len(steps))
    weights = np.exp(-0.5 * (distance**2 - nearest**2))
    weights /= np.sum(weights)
    away = steps - at
    first, second = np.sum(weights * away), np.sum(weights * away**2)
    spread = second - first**2
    if spread <= 1e-3 * second:  # All that is near lies on one side.
        return weights
    return weights * (second - first * away) / spread
