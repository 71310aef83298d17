"""Persistent effects of workers and steps, separated from the data that they happened to get."""

import dataclasses

import numpy as np
from jaxtyping import Float

from ._data_factor import DataFactor
from ._mean_squares import Logs, count, mean


_SWEEPS, _NEWTON = 30, 4
_SEEN = 3.0


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


def data_means(data: DataFactor, logs: Logs) -> tuple[float, Float[np.ndarray, " steps"]]:
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
    along = (
        np.sum(np.where(np.isnan(worker), 0, weights * apart), axis=(1, 2), keepdims=True) / square
    )
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

    factor: Float[np.ndarray, " steps"]
    noise: Float[np.ndarray, " steps"]
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
    own = noise / np.maximum(number, 1) + worker_step / np.maximum(workers, 1)
    weight = np.where(number > 0, 1 / np.maximum(own, 1e-18), 0)
    found, precision, mine = _solved(level, weight, loadings[:, :, None], data)
    some, own = number.sum(axis=(0, 1)) > 0, 1 / precision
    kept = _no_chance(found[some], own[some], 0.0)
    # The data of steps are more than chance if replicas with different data vary together.
    of_data = _no_chance(mine[some], data[some], _SEEN)
    by_group = kept * found + np.log(np.maximum(1 + of_data * loadings[:, :, None] * mine, 0.1))
    factor = found + of_data * mine
    return StepEffects(factor, own + of_data * data, by_group[None, :, :, None])


def _solved(
    level: np.ndarray, weight: np.ndarray, loadings: np.ndarray, data: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The common effect of the groups in each step, its precision, and the mean data of the step,
    minus one, without shrinkage.
    """

    def at(mine: np.ndarray) -> tuple[np.ndarray, ...]:
        relative = np.maximum(1 + loadings * mine, 0.1)
        slope = loadings / relative
        line = level - np.log(relative) + slope * mine
        ones, both, slopes, plain, along = (
            np.sum(x, axis=(0, 1))
            for x in (
                weight,
                weight * slope,
                weight * slope**2,
                weight * line,
                weight * slope * line,
            )
        )
        shrink = data / (1 + data * slopes)
        precision = np.maximum(ones - shrink * both**2, 1e-300)
        found = (plain - shrink * both * along) / precision
        rest = along - both * found
        return found, precision, shrink * rest, rest / np.maximum(slopes, 1e-300)

    mine = np.zeros(level.shape[2])
    for _ in range(_NEWTON):
        mine = at(mine)[2]
    found, precision, _, free = at(mine)
    return found, precision, free


def _no_chance(values: np.ndarray, noise: np.ndarray, seen: float) -> float:
    """The share of the variance of values that noise does not explain (Efron and Morris, 1973), if
    it is `seen` standard errors more.
    """
    if len(values) < 2 or not np.any(values):
        return 0.0
    variance, chance = float(np.var(values, ddof=1)), float(np.mean(noise))
    more = variance > chance * (1 + seen * np.sqrt(2 / (len(values) - 1)))
    return max(1 - chance / variance, 0.0) if more else 0.0
