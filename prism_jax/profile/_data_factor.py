"""The factor of each microbatch's data. It acts on all its compute through loadings:

    relative latency[replica, stage, phase, m, t] = 1 + loading[stage, phase] (f[replica, m, t] - 1)

Long sequences slow attention but not matrix products, so stages and phases have different loadings.
Loadings follow from covariances between ops, which do not contain the noise of single ops (minimum
residuals; Harman and Jones, "Factor analysis by minimizing residuals", 1966).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .._estimate import count, mean


# Iterations: of one factor, of its values, and of workers and steps.
_FACTOR_SWEEPS, _FACTOR_NEWTON, _SWEEPS = 500, 6, 30
# A factor, or a loading other than one, must be significant by this many standard errors.
_SEEN = 3.0
# The smallest and the largest effect of data on an op, over its mean. A longer latency is a stall.
_LEAST, _MOST = 0.02, 20.0

# Logarithms of latencies of compute; `nan` where one is missing.
Logs = Float[np.ndarray, "replicas stages phases microbatches steps"]
Loadings = Float[np.ndarray, "stages phases"]


@dataclasses.dataclass(frozen=True)
class DataFactor:
    """The factor of each microbatch, of mean one, and the loadings of ops on it.

    **Attributes:**

    - `loadings`: `(stages, phases)`, one on average.
    - `factor`: `(replicas, 1, 1, microbatches, steps)`.
    """

    loadings: Loadings
    factor: Float[np.ndarray, "replicas 1 1 microbatches steps"]

    @property
    def _by_group(self) -> Float[np.ndarray, "1 stages phases 1 1"]:
        return self.loadings[None, :, :, None, None]

    @property
    def relative(self) -> Float[np.ndarray, "replicas stages phases microbatches steps"]:
        """The latencies of ops from their data alone, over their means."""
        return np.maximum(1 + self._by_group * (self.factor - 1), _LEAST)

    def slopes(self, there: np.ndarray) -> Float[np.ndarray, "replicas stages phases ..."]:
        """The slope of the logarithm of a latency over the factor; zero for missing ops."""
        return np.where(there, self._by_group / self.relative, 0)


def compute_logs(latencies: Sequence[np.ndarray]) -> Logs:
    """The logarithms of the latencies of the kinds of compute, in the order of their phases; `nan`
    for those that are `nan` or not positive.
    """
    values = np.stack(latencies, axis=2)
    return np.log(np.where(values > 0, values, np.nan))


def rough_data(latencies: Sequence[np.ndarray]) -> Logs:
    """The latencies of the kinds of compute from their data alone, over their means: a first
    estimate, before stalls are separated from them.
    """
    logs = compute_logs(latencies)
    worker, step = main_effects(logs)
    return find_factor(logs - worker, find_loadings(logs - worker - step)).relative


def main_effects(logs: Logs) -> tuple[np.ndarray, np.ndarray]:
    """Effects of workers by phase, `(replicas, stages, phases, 1, 1)`, and of steps."""
    worker, step = np.zeros((1,) * 5), np.zeros((1,) * 5)
    for _ in range(_SWEEPS if np.isnan(logs).any() else 1):
        worker = log_mean(logs - step, (3, 4))
        step = log_mean(logs - worker, (0, 1, 2, 3))
    return worker, step


def log_mean(logs: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The logarithm of the mean over present values; zero if there are none. The axes are kept."""
    means = mean(np.exp(logs), axes)
    return np.log(np.where(means > 0, means, 1))


def find_loadings(logs: Logs) -> Loadings | None:
    """The loadings of ops on the factor of their microbatch's data, one on average; `None` if there
    is no such factor. `logs` are without the effects of workers and steps.
    """
    relative = np.minimum(np.exp(logs), _MOST)
    relative = relative / np.where((level := mean(relative, (0, 3, 4))) > 0, level, 1)
    rows = np.moveaxis(relative - 1, (1, 2), (0, 1)).reshape(logs.shape[1] * logs.shape[2], -1)
    there = ~np.isnan(rows)
    rows = np.where(there, rows, 0)
    number = np.maximum(there.astype(float) @ there.T, 1)
    covariance = rows @ rows.T / number
    stage = np.repeat(np.arange(logs.shape[1]), logs.shape[2])
    used = ~np.eye(len(rows), dtype=bool) & (number > 1)
    # Phases of one worker also share the worker's step.
    if len(np.unique(stage[there.any(axis=1)])) > 2:
        used &= stage[:, None] != stage
    if not used.any():
        return None
    variance = np.diag(covariance)
    chance = np.sqrt(np.sum(np.where(used, np.outer(variance, variance) / number, 0)) * 2)
    if np.sum(covariance[used]) <= _SEEN * chance:
        return None
    raw = _one_factor(covariance, used)
    # The noise of an op, relative to the spread of the factor.
    own_variance = np.maximum(variance - raw**2, 0)
    errors = np.sqrt(own_variance / np.maximum(np.diag(number), 1)) / np.mean(raw)
    loadings = raw / np.mean(raw)
    usable = used.any(axis=1) & (errors > 0)
    off = np.sum(((loadings - 1) / np.where(usable, errors, np.inf)) ** 2)
    if np.sum(usable) < 3 or off <= np.sum(usable) + _SEEN * np.sqrt(2 * np.sum(usable)):
        loadings = np.ones_like(loadings)
    return np.where(used.any(axis=1), loadings, 1).reshape(logs.shape[1:3])


def _one_factor(covariance: np.ndarray, used: np.ndarray) -> Float[np.ndarray, " groups"]:
    """The vector whose outer product is nearest to the covariances that are used."""
    products = np.where(used, covariance, 0)
    loadings = np.full(len(products), np.sqrt(np.sum(products) / np.sum(used)))
    for _ in range(_FACTOR_SWEEPS):
        before = loadings.copy()
        for group in np.flatnonzero(used.any(axis=1)):
            square = np.sum(np.where(used[group], loadings, 0) ** 2)
            loadings[group] = max(products[group] @ loadings / square, 0.0) if square > 0 else 0.0
        if np.max(np.abs(loadings - before)) <= 1e-9 * np.max(loadings):
            break
    return loadings


def find_factor(logs: Logs, loadings: Loadings | None) -> DataFactor:
    """The factor of each microbatch, by least squares of logarithms; `logs` are without the effects
    of workers and steps. Without loadings, microbatches are equal.
    """
    if loadings is None:
        return no_factor(logs)
    there = ~np.isnan(logs)
    by_group = loadings[None, :, :, None, None]
    weight = np.where(there, by_group**2, 0).sum(axis=(1, 2), keepdims=True)
    rise = np.where(there, by_group * (np.minimum(np.exp(logs), _MOST) - 1), 0)
    factor = 1 + rise.sum(axis=(1, 2), keepdims=True) / np.maximum(weight, 1e-300)
    lowest = 1 - (1 - _LEAST) / max(float(loadings.max()), 1.0)
    for _ in range(_FACTOR_NEWTON):
        data = DataFactor(loadings, np.maximum(factor, lowest))
        slopes = data.slopes(there)
        off = np.where(there, logs - np.log(data.relative), 0)
        square = np.sum(slopes**2, axis=(1, 2), keepdims=True)
        step = np.sum(slopes * off, axis=(1, 2), keepdims=True) / np.maximum(square, 1e-300)
        # At most a factor of two in one iteration.
        factor = data.factor * np.exp(np.clip(step / data.factor, -0.7, 0.7))
    factor = np.where(count(logs, (1, 2)) > 0, np.maximum(factor, lowest), 1)
    return DataFactor(loadings, factor)


def no_factor(logs: Logs) -> DataFactor:
    """The factor of equal microbatches."""
    replicas, stages, phases, microbatches, steps = logs.shape
    factor = np.ones((replicas, 1, 1, microbatches, steps))
    return DataFactor(np.ones((stages, phases)), factor)
