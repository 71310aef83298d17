"""Persistent effects of workers, and effects that ops of a step share, separated from the data that
they happened to get; and variances from mean squares, which are equated with their expectations
(Searle, Casella and McCulloch, "Variance Components", 1992, ch. 5), with means over present values.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

from .._estimate import count, mean
from ._data_factor import DataFactor, Loadings, Logs, find_factor, find_loadings, log_mean
from ._profile import Component


# Latencies whose logarithms differ by less are equal except for rounding.
ALIKE = 1e-9
# An effect, or a variance, must be significant by this many standard errors.
_SEEN = 3.0
# Equations of a larger condition number have no solution.
_SINGULAR = 1e8
# Iterations for the data of steps.
_NEWTON = 4

OfSteps = Float[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True)
class Variance:
    """A variance with its standard error; `None` if it cannot be estimated, for the reason in
    `note`. `chance` is the standard error if the true variance were zero.
    """

    value: float | None
    error: float = 0.0
    note: str = ""
    chance: float = 0.0

    @property
    def known(self) -> float:
        """The variance; zero if it cannot be estimated or is negative."""
        return max(self.value or 0.0, 0.0)

    @property
    def by_chance(self) -> bool:
        """Whether it is within three standard errors of zero."""
        return bool(self.known <= _SEEN * self.chance)

    def component(self, name: str) -> Component:
        """The component with this name: the standard deviation, with its standard error."""
        if self.value is None:
            return Component(name, None, None, self.note)
        if max(self.known, self.error) <= ALIKE**2:
            return Component(name, None, None, "all values are equal")
        deviation = float(np.sqrt(self.known))
        # Near zero, the error of the deviation is the root of the error of the variance.
        error = self.error / (2 * max(deviation, np.sqrt(self.error)))
        if self.by_chance:  # Then the deviation is within three standard errors of zero, too.
            error = max(error, deviation / _SEEN)
        return Component(name, deviation, float(error), self.note)


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


def separated(
    body: Logs, whole: np.ndarray, known: Loadings | None
) -> tuple[Loadings | None, np.ndarray, Component, StepEffects, OfSteps]:
    """The persistent effects of workers and steps if data have the loadings `known`; `whole` are
    the effects of workers with their data.

    **Returns:**

    The loadings of the data that are left; the effects of workers, `(replicas, stages, phases, 1,
    1)`, and their component; the effects of steps, and the variance by chance of the mean data of a
    step.
    """
    data = find_factor(body - whole, known)
    (residual, worker_step), _ = inner_variances(body - whole, data)
    of_replica, of_step = data_means(data, body)
    loadings = np.ones(body.shape[1:3]) if known is None else known
    number = count(body, (3, 4))
    rank = between_workers(number, whole, loadings, residual.known, of_replica)
    worker = without_data(whole, loadings, rank.known, of_replica)
    step = step_effects(body - worker, loadings, residual.known, worker_step.known, of_step)
    left = find_loadings(body - worker - step.by_group)
    return left, worker, rank.component("rank"), step, of_step


def inner_variances(logs: Logs, data: DataFactor) -> tuple[tuple[Variance, Variance], Logs]:
    """The variances of the residual and of a worker's step, and the rest without the data."""
    apart = logs - np.log(data.relative)
    residuals = apart - mean(apart, (3, 4)) - mean(apart, (0, 1, 2, 3))
    return within(residuals, data.slopes(~np.isnan(logs))), residuals


def within(logs: Logs, slopes: np.ndarray) -> tuple[Variance, Variance]:
    """The variances of the residual and of a worker in one step, from the rest after steps, the
    means of each worker and phase, and the data of microbatches.

    **Arguments:**

    - `logs`: logarithms without the means of workers and steps.
    - `slopes`: their slopes over the data of their microbatches. The part along the slopes is not
        used.
    """
    steps, number = logs.shape[4], count(logs, (1, 2))
    there = ~np.isnan(logs) & (number > 1)
    if not there.any():
        unknown = Variance(None, note="a microbatch has one op, so they cannot be separated")
        return unknown, unknown
    # The unit vector of the data, and the part at right angles to it.
    unit = np.where(there, slopes, 0)
    unit = unit / np.maximum(np.sqrt(np.sum(unit**2, axis=(1, 2), keepdims=True)), 1e-300)
    filled = np.where(there, logs, 0)
    deviations = filled - unit * np.sum(unit * filled, axis=(1, 2), keepdims=True)
    cells = np.sum(there, axis=(2, 3))
    means = np.sum(deviations, axis=(2, 3)) / np.maximum(cells, 1)
    total, ops = float(np.sum(deviations**2)), max(float(np.sum(there)), 1.0)
    op_df = max(float(np.sum(np.maximum(number - 1, 0))), 1.0)
    # The means over the steps, of workers and of their phases, were subtracted before.
    phases = np.count_nonzero(there.any(axis=(3, 4))) - np.count_nonzero(there.any(axis=(2, 3, 4)))
    total *= op_df / max(op_df - phases, 1.0) / ops
    between = float(np.sum(means**2)) / max(np.sum(cells > 0), 1)
    if steps > 1:
        total, between = total + between / (steps - 1), between * steps / (steps - 1)
    expected = _expected_squares(there, unit, cells)
    if np.linalg.cond(expected) < _SINGULAR:
        worker_own, own = np.linalg.solve(expected, [between, total])
        df = max(float(np.sum(cells > 0)) * expected[0, 0] - logs.shape[0] * logs.shape[1], 1.0)
        scatter = np.sqrt(2 / df) / expected[0, 0]
        chance = max(own, 0.0) * expected[0, 1] * scatter
        worker_step = Variance(worker_own, between * scatter, chance=chance)
        if worker_step.by_chance:
            worker_step = Variance(min(worker_own, 0.0), between * scatter)
    else:
        own = total / expected[1, 1]
        note = "a worker's step cannot be separated from its replica's or from the residual"
        worker_step = Variance(None, note=note)
    return Variance(own, own * np.sqrt(2 / op_df)), worker_step


def _expected_squares(there: np.ndarray, unit: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The weights of the variances of a worker's step and of the residual, in the mean square of
    workers and in that of ops, both at right angles to the data of their microbatches.

    **Arguments:**

    - `there`, `unit`: which ops are present, and the unit vector of the data of each microbatch.
    - `cells`: `(replicas, stages, steps)`, how many ops a worker has in a step.
    """
    stages = unit.sum(axis=2)
    # The share of another stage (third axis) in the means of a worker's stage (second axis).
    parts = np.einsum("dsmt,dkmt->dskt", stages, stages) / np.maximum(cells, 1)[:, :, None]
    kept = np.eye(parts.shape[1])[None, :, :, None] * (cells > 0)[:, :, None] - parts
    workers, ops = np.maximum(np.sum(cells > 0), 1), max(float(np.sum(there)), 1.0)
    own_terms = np.einsum("dsst->dst", kept) / np.maximum(cells, 1)
    of_ops = np.sum(there) - np.sum(stages**2)
    freedom = np.sum(np.maximum(np.sum(there, axis=(1, 2)) - 1, 0))
    return np.array(
        [[np.sum(kept**2) / workers, np.sum(own_terms) / workers], [of_ops / ops, freedom / ops]]
    )


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


def between_workers(
    number: np.ndarray, effects: np.ndarray, loadings: np.ndarray, noise: float, data: float
) -> Variance:
    """The variance of persistent differences between the workers of a stage.

    Differences between replicas along the loadings may come from their data. So they are estimated
    separately, with less weight if data spread them.

    **Arguments:**

    - `number`, `effects`: `(replicas, stages, phases, 1, 1)`, how many ops a worker has in a phase,
        and the logarithms of their means.
    - `loadings`: `(stages, phases)`, their loadings on the data.
    - `noise`, `data`: the variances of an op, and of the data of a replica.
    """
    cells = np.sum(number, axis=2)[:, :, 0, 0]
    there = cells > 0
    worker = np.sum(effects * number, axis=2)[:, :, 0, 0] / np.maximum(cells, 1)
    by_stage = mean(np.where(number[:1] > 0, loadings[None, :, :, None, None], np.nan), (2,))
    noise *= float(np.mean(1 / cells[there]))
    replicas = np.sum(there, axis=0)
    df = float(np.sum(np.maximum(replicas - 1, 0)))
    if df == 0:
        return Variance(None, note="one replica: workers of a stage cannot be compared")
    used = there & (replicas > 1)
    centre = np.sum(np.where(there, worker, 0), axis=0) / np.maximum(replicas, 1)
    rows = np.where(used, worker - centre, 0)
    unit = np.where(used, by_stage.reshape(-1), 0)
    length = np.maximum(np.sqrt(np.sum(unit**2, axis=1)), 1e-300)
    along = np.sum(rows * unit, axis=1) / length
    along_df = df / max(np.sum(used) / max(np.sum(used.any(axis=1)), 1), 1)
    spread = data * float(np.sum(length**2) / max(np.sum(length > 0), 1))
    squares = np.array([np.sum(along**2), np.sum(rows**2) - np.sum(along**2)])
    dfs, noises = np.array([along_df, df - along_df]), np.array([noise + spread, noise])
    known = dfs > 0.5
    squares, dfs, noises = squares[known], dfs[known], noises[known]
    values = squares / dfs - noises
    # A rough value first, for the weights.
    weights = dfs / (max(values.min(), 0.0) + noises + ALIKE**2) ** 2
    value = float(np.sum(weights * values) / np.sum(weights))
    error = float(np.sqrt(2 / np.sum(dfs / (max(value, 0.0) + noises + ALIKE**2) ** 2)))
    note = f"from {int(np.sum(there))} workers" if df < 30 else ""
    return Variance(value, error, note)


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
    level: np.ndarray, weight: np.ndarray, loadings: np.ndarray, variance_of_data: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The common effect of the groups in each step, its precision, and the mean data of the step,
    minus one, without shrinkage.
    """
    shift = np.zeros(level.shape[2])
    effect = precision = unshrunk = shift
    for _ in range(1 + _NEWTON):
        relative = np.maximum(1 + loadings * shift, 0.1)
        slope = loadings / relative
        response = level - np.log(relative) + slope * shift
        terms = (
            weight,
            weight * slope,
            weight * slope**2,
            weight * response,
            weight * slope * response,
        )
        sum_w, sum_ws, sum_wss, sum_wy, sum_wsy = (np.sum(term, axis=(0, 1)) for term in terms)
        variance_of_shift = variance_of_data / (1 + variance_of_data * sum_wss)
        precision = np.maximum(sum_w - variance_of_shift * sum_ws**2, 1e-300)
        effect = (sum_wy - variance_of_shift * sum_ws * sum_wsy) / precision
        projected = sum_wsy - sum_ws * effect
        shift, unshrunk = variance_of_shift * projected, projected / np.maximum(sum_wss, 1e-300)
    return effect, precision, unshrunk


def _no_chance(values: np.ndarray, noise: np.ndarray, seen: float) -> float:
    """The share of the variance of values that noise does not explain (Efron and Morris, 1973), if
    it is `seen` standard errors more.
    """
    if len(values) < 2 or not np.any(values):
        return 0.0
    variance, chance = float(np.var(values, ddof=1)), float(np.mean(noise))
    is_more = variance > chance * (1 + seen * np.sqrt(2 / (len(values) - 1)))
    return max(1 - chance / variance, 0.0) if is_more else 0.0
