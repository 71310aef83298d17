"""Figures of the law of the step time beside measured steps, to fit a law to them."""

import equinox as eqx
import numpy as np
from jax.typing import ArrayLike

from .._misc import FrozenArray
from ..law import crps, matched, wasserstein
from ._density import Steps
from ._objectives import AbstractObjective


class CRPS(AbstractObjective):
    """The mean continuous ranked probability score of the law at measured step times, in seconds:
    `E|X - y| - E|X - X'| / 2`. Smaller is better. Use it to fit a law to measured step times.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """

    measured: FrozenArray = eqx.field(static=True)

    def __init__(self, measured: ArrayLike):
        self.measured = _ordered(measured)

    def value(self, steps: Steps) -> float:
        return crps(np.sort(steps), self.measured.value)

    def slope(self, steps: Steps, width: float) -> Steps:
        # The distribution function of the measured steps, minus that of the steps; ties count half.
        return 2 * (_ranks(self.measured.value, steps) - _ranks(np.sort(steps), steps)) / len(steps)

    def influence(self, steps: Steps, width: float) -> Steps:
        away = _mean_distance(self.measured.value, steps) - _mean_distance(np.sort(steps), steps)
        return away - np.mean(away)


class Wasserstein(AbstractObjective):
    """The Wasserstein-1 distance of the law from measured step times, in seconds: see
    [`wasserstein`][]. Smaller is better. It tells by how much steps are off, where the CRPS also
    rewards a law for being certain.
    """

    measured: FrozenArray = eqx.field(static=True)

    def __init__(self, measured: ArrayLike):
        self.measured = _ordered(measured)

    def value(self, steps: Steps) -> float:
        return float(wasserstein(steps, self.measured.value))

    def slope(self, steps: Steps, width: float) -> Steps:
        order = np.argsort(steps)
        to, of, weights = matched(len(steps), len(self.measured.value))
        signs = np.sign(steps[order][to] - self.measured.value[of])
        slopes = np.empty(len(steps))
        slopes[order] = np.bincount(to, weights * signs, len(steps))
        return slopes

    def influence(self, steps: Steps, width: float) -> Steps:
        # What more weight on a step adds: the integral of the sign of F - G from the step on.
        points = np.union1d(steps, self.measured.value)
        excess = [
            np.searchsorted(np.sort(x), points[:-1], "right") / len(x)
            for x in (steps, self.measured.value)
        ]
        pieces = np.sign(excess[0] - excess[1]) * np.diff(points)
        beyond = np.append(np.cumsum(pieces[::-1])[::-1], 0.0)[np.searchsorted(points, steps)]
        return beyond - np.mean(beyond)


def _ordered(measured: ArrayLike) -> FrozenArray:
    values = np.sort(np.asarray(measured, float))
    if values.ndim != 1 or not len(values) or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError("Measured steps must be a list of positive step times, in seconds.")
    return FrozenArray(values)


def _ranks(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The share of `ordered` below each of `at`."""
    sides = [np.searchsorted(ordered, at, side) for side in ("left", "right")]
    return (sides[0] + sides[1]) / (2 * len(ordered))


def _mean_distance(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The mean distance of each of `at` from all of `ordered`."""
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, at)
    return (at * (2 * below - len(ordered)) + total[-1] - 2 * total[below]) / len(ordered)
