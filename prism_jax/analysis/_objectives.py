"""Figures of the law of the step time that one may want to lower."""

import abc

import equinox as eqx
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from .._misc import FrozenArray
from ._score import crps


Steps = Float[np.ndarray, " steps"]


class AbstractObjective(eqx.Module):
    """A figure of the law of the step time, and how it depends on the steps.

    All methods take composed steps in seconds, in float64 on the host.
    """

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

    Its derivative is the mean of the steps' derivatives around the quantile, with Gaussian weights
    of half a standard deviation times `n ** -0.2`: one order statistic alone would never settle
    (Hong, "Estimating quantile sensitivities", 2009).
    """

    q: float = eqx.field(static=True)

    def __check_init__(self):
        _check_probability(self.q)

    def value(self, steps: Steps) -> float:
        return float(np.quantile(steps, self.q))

    def slope(self, steps: Steps) -> Steps:
        weights = _nearby(steps, self.value(steps))
        return weights / np.sum(weights)

    def influence(self, steps: Steps) -> Steps:
        at = self.value(steps)
        density = np.mean(_nearby(steps, at))
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
        return float(at + np.mean(np.maximum(steps - at, 0)) / (1 - self.q))

    def slope(self, steps: Steps) -> Steps:
        beyond = steps >= np.quantile(steps, self.q)
        return beyond / np.sum(beyond)

    def influence(self, steps: Steps) -> Steps:
        at = np.quantile(steps, self.q)
        contribution = np.maximum(steps - at, 0) / (1 - self.q)
        return contribution - np.mean(contribution)


class Exceedance(AbstractObjective):
    """The probability that a step takes longer than `threshold` seconds.

    Its derivative is the density at the threshold times the mean derivative of the steps there,
    with the weights of `Quantile`: the derivative of the indicator itself is zero, and wrong.
    """

    threshold: float = eqx.field(static=True)

    def __check_init__(self):
        if not 0 < self.threshold < float("inf"):
            raise ValueError(f"The threshold of {self.threshold} s must be a positive step time.")

    def value(self, steps: Steps) -> float:
        return float(np.mean(steps > self.threshold))

    def slope(self, steps: Steps) -> Steps:
        return _nearby(steps, self.threshold) / len(steps)

    def influence(self, steps: Steps) -> Steps:
        above = steps > self.threshold
        return above - np.mean(above)


class CRPS(AbstractObjective):
    """The mean continuous ranked probability score of the law at measured step times, in seconds:
    `E|X - y| - E|X - X'| / 2`, the smaller the better. For fitting a law to what was measured.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """

    measured: FrozenArray = eqx.field(static=True)

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


def _nearby(steps: Steps, at: float) -> Steps:
    """A Gaussian kernel around `at`, of unit integral."""
    width = 0.5 * np.std(steps) * len(steps) ** -0.2
    if width == 0:
        return (steps == at).astype(float)
    return np.exp(-0.5 * ((steps - at) / width) ** 2) / (width * np.sqrt(2 * np.pi))
