"""Effects that ops share: the data of their microbatch, their worker, and their step.

The factor of a microbatch's data acts on all its compute through loadings:

    relative latency[replica, stage, phase, m, t] = 1 + loading[stage, phase] (f[replica, m, t] - 1)

Long sequences slow attention but not matrix products, so stages and phases have different loadings.
Loadings follow from covariances between ops, which do not contain the noise of single ops (minimum
residuals; Harman and Jones, "Factor analysis by minimizing residuals", 1966). Persistent effects of
workers and steps are separated from the data that they happened to get.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from ._mean_squares import Logs, OfSteps, count, mean


# Iterations: of one factor, of its values, of workers and steps, and of the data of steps.
_FACTOR_SWEEPS, _FACTOR_NEWTON, _SWEEPS, _NEWTON = 500, 6, 30, 4
# A factor, or a loading other than one, must be significant by this many standard errors.
_SEEN = 3.0
# The smallest and the largest effect of data on an op, over its mean. A longer latency is a stall.
_LEAST, _MOST = 0.02, 20.0


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


def data_of(logs: Logs) -> DataFactor:
    """A first estimate of the data of microbatches, before stalls are separated from them."""
    worker, step = main_effects(logs)
    return find_factor(logs - worker, find_loadings(logs - worker - step))


def no_factor(logs: Logs) -> DataFactor:
    """The factor of equal microbatches."""
    replicas, stages, phases, microbatches, steps = logs.shape
    factor = np.ones((replicas, 1, 1, microbatches, steps))
    return DataFactor(np.ones((stages, phases)), factor)


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


def log_mean(logs: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The logarithm of the mean over present values; zero if there are none. The axes are kept."""
    means = mean(np.exp(logs), axes)
    return np.log(np.where(means > 0, means, 1))


def main_effects(logs: Logs) -> tuple[np.ndarray, np.ndarray]:
    """Effects of workers by phase, `(replicas, stages, phases, 1, 1)`, and of steps."""
    worker, step = np.zeros((1,) * 5), np.zeros((1,) * 5)
    for _ in range(_SWEEPS if np.isnan(logs).any() else 1):
        worker = log_mean(logs - step, (3, 4))
        step = log_mean(logs - worker, (0, 1, 2, 3))
    return worker, step


def data_means(data: DataFactor, logs: Logs) -> tuple[float, OfSteps]:
    """The variances by chance of the mean data of a replica, and of each step, from the differences
    between replicas in one step; so they include what microbatches of a replica's step share.
    """
    factor = np.where(count(logs, (1, 2)) > 0, data.factor, np.nan)
    there = count(factor, (3,)) > 0
    cells = np.where(there, mean(factor, (3,)), np.nan)
    replicas, steps = np.sum(there.any(axis=4)), np.sum(there.any(axis=0))
    if replicas > 1 and steps > 1:
        centred = cells - mean(cells, (0,)) - mean(cells, (4,)) + mean(cells, (0, 4))
        # As a share of the degrees of freedom.
        cell = np.nansum(centred**2) / np.sum(there) * replicas * steps
        cell /= (replicas - 1) * (steps - 1)
    else:  # The common part of a step's microbatches is not known.
        number = np.maximum(count(factor, (3,)), 1)
        inner = factor - mean(factor, (3,))
        cell = np.nansum(inner**2) / max(np.sum(np.maximum(number - 1, 0)), 1) / np.mean(number)
    of_replica = cell / max(np.sum(there) / max(replicas, 1), 1)
    of_step = cell / np.maximum(np.sum(there, axis=(0, 1, 2, 3)), 1)
    return float(of_replica), of_step


def without_data(
    worker: np.ndarray, loadings: np.ndarray, own: float, by_chance: float
) -> np.ndarray:
    """The effects of workers, without the differences between replicas that come from their data.
    The part along the loadings is multiplied by the share of the workers' variance `own` in the sum
    of `own` and the variance of the data (empirical Bayes; Efron and Morris, "Stein's estimation
    rule and its competitors", 1973).
    """
    if worker.shape[0] < 2 or by_chance <= 0:
        return worker
    weights = np.where(np.isnan(worker), 0, loadings[None, :, :, None, None])
    square = np.maximum(np.sum(weights**2, axis=(1, 2), keepdims=True), 1e-300)
    apart = worker - mean(worker, (0,))
    products = np.where(np.isnan(worker), 0, weights * apart)
    along = np.sum(products, axis=(1, 2), keepdims=True) / square
    # Phases of a worker have one effect.
    stages = np.sum(np.sum(weights, axis=2, keepdims=True) ** 2, axis=(1, 2), keepdims=True)
    variance = own * stages / square**2
    data = along * by_chance / (variance + by_chance)
    return worker - np.log(np.maximum(1 + weights * data, 0.1))


@dataclasses.dataclass(frozen=True)
class StepEffects:
    """The effects that the ops of a step have in common.

    **Attributes:**

    - `factor`, `noise`: `(steps,)`, the logarithm of a factor of mean one, and its variance by
        chance.
    - `by_group`: `(1, stages, phases, 1, steps)`, the part of it that is not chance, for each kind
        of op.
    """

    factor: OfSteps
    noise: OfSteps
    by_group: np.ndarray


def step_effects(
    logs: Logs, loadings: np.ndarray, noise: float, worker_step: float, data: np.ndarray
) -> StepEffects:
    """The effects that all ops of a step have in common, by generalised least squares. An effect
    along the loadings may come from the data of the step, as far as chance explains it.

    **Arguments:**

    - `logs`: logarithms without the effects of workers.
    - `noise`, `worker_step`: the variances of an op and of a worker in one step.
    - `data`: `(steps,)`, the variance of the mean data of a step.
    """
    number = count(logs, (0, 3))[0, :, :, 0]
    level = log_mean(logs, (0, 3))[0, :, :, 0]
    # A worker's step acts on all microbatches of its phases.
    workers = np.sum((~np.isnan(logs)).any(axis=(2, 3)), axis=0)[:, None]
    own_variance = noise / np.maximum(number, 1) + worker_step / np.maximum(workers, 1)
    weight = np.where(number > 0, 1 / np.maximum(own_variance, 1e-18), 0)
    effect, precision, shift = _solved(level, weight, loadings[:, :, None], data)
    present, own_variance = number.sum(axis=(0, 1)) > 0, 1 / precision
    kept = _no_chance(effect[present], own_variance[present], 0.0)
    # The data of steps are more than chance if replicas with different data vary together.
    of_data = _no_chance(shift[present], data[present], _SEEN)
    by_group = kept * effect + np.log(np.maximum(1 + of_data * loadings[:, :, None] * shift, 0.1))
    factor = effect + of_data * shift
    return StepEffects(factor, own_variance + of_data * data, by_group[None, :, :, None])


def _solved(
    level: np.ndarray, weight: np.ndarray, loadings: np.ndarray, data: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The common effect of the groups in each step, its precision, and the mean data of the step,
    minus one, without shrinkage.
    """
    shift = np.zeros(level.shape[2])
    effect = precision = free = shift
    for _ in range(1 + _NEWTON):
        relative = np.maximum(1 + loadings * shift, 0.1)
        slope = loadings / relative
        line = level - np.log(relative) + slope * shift
        terms = (weight, weight * slope, weight * slope**2, weight * line, weight * slope * line)
        total, cross, slopes, plain, along = (np.sum(term, axis=(0, 1)) for term in terms)
        shrink = data / (1 + data * slopes)
        precision = np.maximum(total - shrink * cross**2, 1e-300)
        effect = (plain - shrink * cross * along) / precision
        projected = along - cross * effect
        shift, free = shrink * projected, projected / np.maximum(slopes, 1e-300)
    return effect, precision, free


def _no_chance(values: np.ndarray, noise: np.ndarray, seen: float) -> float:
    """The share of the variance of values that noise does not explain (Efron and Morris, 1973), if
    it is `seen` standard errors more.
    """
    if len(values) < 2 or not np.any(values):
        return 0.0
    variance, chance = float(np.var(values, ddof=1)), float(np.mean(noise))
    is_more = variance > chance * (1 + seen * np.sqrt(2 / (len(values) - 1)))
    return max(1 - chance / variance, 0.0) if is_more else 0.0
