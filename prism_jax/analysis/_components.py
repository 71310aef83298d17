"""What makes the compute of a traced job vary, taken apart: GPUs, steps, microbatches, the rest.

    log latency = mean[stage, phase] + worker + step[t] + worker_step[worker, t]
                  + microbatch[replica, m, t] + residual,          step[t] autoregressive

Variances are estimated by equating mean squares with their expectations (unweighted means where
data are missing; Searle, Casella and McCulloch, "Variance Components", 1992, ch. 5), the step's
variance and autocorrelation by restricted maximum likelihood. Stalls are taken out first.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ..data import Component
from ..trace import Trace


# An op so many robust standard deviations above the median of its worker has stalled.
_STALL_DEVIATIONS = 8.0
# With fewer pairs of neighbouring steps, an autocorrelation is not told.
_FEWEST_PAIRS = 20
_SWEEPS = 30
# The weight of the logarithm of `1 - autocorrelation**2` in the likelihood.
_OFF_ONE = 0.5

Logs = Float[np.ndarray, "replicas stages phases microbatches steps"]


def fit_components(trace: Trace) -> tuple[Component, ...]:
    """The components of the compute of a traced job. See `components`."""
    phases = ("forward-compute", "backward-compute")
    seconds = np.stack([trace.end[name] - trace.start[name] for name in phases])
    with np.errstate(divide="ignore"):
        logs = np.log(np.where(seconds > 0, seconds, np.nan))
    return components(np.moveaxis(logs, (0, 1), (2, 4)), trace.steps)


def components(logs: Logs, steps: Int[np.ndarray, " steps"]) -> tuple[Component, ...]:
    """Takes latencies apart.

    **Arguments:**

    - `logs`: logarithms of latencies; `nan` where one is missing.
    - `steps`: the number of each step, increasing; there may be gaps.

    **Returns:**

    - `rank`, `step`, `worker_step`, `microbatch`, `residual`: standard deviations of logarithms,
      which are relative spreads.
    - `step_autocorrelation`: of the step's factor with that of the next step. In short traces it
      is too low: it takes many times `1 / (1 - autocorrelation)` steps.
    - `stall_rate`: stalls per op.

    Each with a standard error, and `None` with the reason for what the data cannot tell.
    """
    body, stalls = _without_stalls(logs)
    body = body - _mean(body, (0, 3, 4))
    worker, step = _main_effects(body)
    rest = body - worker - step
    residual, worker_step, microbatch = _within(rest)
    rank = _between_workers(body, step, (residual, worker_step, microbatch))
    noise = _noise_of_steps(body, (residual, worker_step, microbatch))
    return (
        rank,
        *_of_steps(step.reshape(-1), noise, steps),
        worker_step.component("worker_step"),
        microbatch.component("microbatch"),
        residual.component("residual"),
        stalls,
    )


@dataclasses.dataclass(frozen=True)
class _Variance:
    """A variance with its standard error; `None` where it is not told, for the reason `note`."""

    value: float | None
    error: float = 0.0
    note: str = ""

    @property
    def known(self) -> float:
        return max(self.value or 0.0, 0.0)

    def component(self, name: str) -> Component:
        if self.value is None:
            return Component(name, None, None, self.note)
        deviation = float(np.sqrt(self.known))
        # Near zero the deviation is known to the root of what its square is.
        error = self.error / (2 * max(deviation, np.sqrt(self.error), 1e-300))
        return Component(name, deviation, float(error), self.note)


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of what is there; zero where nothing is."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def _count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)


def _without_stalls(logs: Logs) -> tuple[Logs, Component]:
    centre = np.nanmedian(logs, axis=(3, 4), keepdims=True)
    away = np.nanmedian(np.abs(logs - centre), axis=(3, 4), keepdims=True)
    stalled = logs - centre > _STALL_DEVIATIONS * 1.4826 * away
    number, of = int(np.sum(stalled)), int(np.sum(~np.isnan(logs)))
    # The error of a count, as if there had been one more: none seen is not none.
    error = np.sqrt(number + 1) / of
    return np.where(stalled, np.nan, logs), Component("stall_rate", number / of, float(error))


def _main_effects(body: Logs) -> tuple[np.ndarray, np.ndarray]:
    """Effects of workers, `(replicas, stages, 1, 1, 1)`, and of steps, by least squares."""
    worker, step = np.zeros((1,) * 5), np.zeros((1,) * 5)
    for _ in range(_SWEEPS if np.isnan(body).any() else 1):
        worker = _mean(body - step, (2, 3, 4))
        step = _mean(body - worker, (0, 1, 2, 3))
    return worker, step


def _within(rest: Logs) -> tuple[_Variance, _Variance, _Variance]:
    """The variances of the residual, of a worker in one step, and of microbatches."""
    steps = rest.shape[4]
    of_microbatch = _mean(rest, (1, 2))
    number = _count(rest, (1, 2))
    # What the ops of one microbatch differ by: the residual and the worker's step.
    within = rest - np.where(number > 1, of_microbatch, np.nan)
    mine = _count(within, (2,))
    cells = _count(within, (2, 3))
    total = float(np.nanmean(within**2))
    between = float(np.sum(_mean(within, (2, 3)) ** 2) / max(np.sum(cells > 0), 1))
    # Workers have lost their mean over the steps.
    if steps > 1:
        total, between = total + between / (steps - 1), between * steps / (steps - 1)
    expected = _expected_squares(mine, np.where(number > 1, number, 0), cells)
    op_df = max(float(np.sum(np.maximum(number - 1, 0))), 1.0)
    if rest.shape[1] > 1:
        worker_own, own = np.linalg.solve(expected, [between, total])
        df = max(float(np.sum(cells > 0)) * expected[0, 0] - rest.shape[0] * rest.shape[1], 1.0)
        worker_step = _Variance(worker_own, between / expected[0, 0] * np.sqrt(2 / df))
    else:
        own = total / expected[1, 1]
        note = "one stage: what a worker has in one step is not told from what its replica has"
        worker_step = _Variance(None, note=note)
    residual = _Variance(own, own * np.sqrt(2 / op_df))
    # Microbatches of one replica and step share all else.
    means = np.where(number > 0, of_microbatch, np.nan)
    per_cell = _count(means, (3,))
    if not np.any(per_cell > 1):
        return residual, worker_step, _Variance(None, note="one microbatch in a step")
    spread = means - _mean(means, (3,))
    cell = np.where(per_cell > 1, np.nansum(spread**2, axis=3, keepdims=True), 0)
    df = float(np.sum(np.maximum(per_cell - 1, 0)))
    square = float(np.sum(cell)) / df
    own = residual.known * float(np.mean(1 / number[number > 0]))
    return residual, worker_step, _Variance(square - own, square * np.sqrt(2 / df))


def _expected_squares(
    mine: np.ndarray, number: np.ndarray, cells: np.ndarray
) -> Float[np.ndarray, "2 2"]:
    """The weights of the variances of a worker's step and of the residual, in the mean square of
    workers and in that of ops, both about the means of their microbatches.

    **Arguments:**

    - `mine`: how many ops a stage has of each microbatch; `number`, all stages together.
    - `cells`: how many a stage has of all microbatches.
    """
    some = np.maximum(number, 1)
    share = mine / some
    # What part the other stages (second axis: of whom, last: of which) have in a worker's means.
    parts = np.einsum("dsfmt,dkfmt->dskt", mine, share)
    parts = parts / np.maximum(cells[:, :, 0, 0, None, :], 1)
    own = np.eye(parts.shape[1])[None, :, :, None]
    there = np.maximum(np.sum(cells > 0), 1)
    of_workers = np.sum(((own - parts) ** 2).sum(axis=2) * (cells[:, :, 0, 0] > 0)) / there
    of_residual = np.sum(mine * (1 - share), axis=3, keepdims=True) / np.maximum(cells, 1) ** 2
    ops = max(float(np.sum(number)), 1.0)
    of_ops = np.sum(number * (1 - np.sum(share**2, axis=1, keepdims=True)) * (number > 0)) / ops
    left = np.sum(np.maximum(number - 1, 0)) / ops
    return np.array([[of_workers, np.sum(of_residual) / there], [of_ops, left]])


def _noise(body: Logs, axes: tuple[int, ...], variances: tuple[_Variance, ...]) -> np.ndarray:
    """The variance of means over `axes`, from what varies within them."""
    residual, worker_step, microbatch = (v.known for v in variances)
    there = ~np.isnan(body)

    def repeats(merged: tuple[int, ...]) -> np.ndarray:
        """For each mean, one over the number of different draws of a component in it."""
        counts = np.sum(there, axis=merged, keepdims=True).astype(float)
        rest = tuple(axis for axis in axes if axis not in merged)
        total = np.sum(counts, axis=rest, keepdims=True)
        return np.sum(counts**2, axis=rest, keepdims=True) / np.maximum(total, 1) ** 2

    return (
        residual * repeats(())
        + worker_step * repeats((2, 3))
        + microbatch * repeats(tuple(axis for axis in (1, 2) if axis in axes))
    )


def _noise_of_steps(body: Logs, variances: tuple[_Variance, ...]) -> np.ndarray:
    return _noise(body, (0, 1, 2, 3), variances).reshape(-1)


def _between_workers(body: Logs, step: np.ndarray, variances: tuple[_Variance, ...]) -> Component:
    """How much the workers of a stage differ for good."""
    cells = _count(body, (2, 3, 4))
    worker = np.where(cells > 0, _mean(body - step, (2, 3, 4)), np.nan)
    number = _count(worker, (0,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return Component("rank", None, None, "one replica: workers of a stage cannot be compared")
    deviations = np.where(number > 1, worker - _mean(worker, (0,)), np.nan)
    square = float(np.nansum(deviations**2)) / df
    own = float(np.mean(_noise(body, (2, 3, 4), variances)[cells > 0]))
    note = f"from {int(np.sum(cells > 0))} workers" if df < 30 else ""
    return _Variance(square - own, square * np.sqrt(2 / df), note).component("rank")


def _of_steps(
    factor: Float[np.ndarray, " steps"],
    noise: Float[np.ndarray, " steps"],
    steps: Int[np.ndarray, " steps"],
) -> tuple[Component, Component]:
    """Spread and autocorrelation of the step's factor, by restricted maximum likelihood."""
    from scipy.optimize import minimize

    name = "step_autocorrelation"
    pairs = int(np.sum(np.diff(steps) == 1))
    if len(factor) < 3:
        note = "fewer than three steps"
        return Component("step", None, None, note), Component(name, None, None, note)
    gaps = np.abs(steps[:, None] - steps[None, :]).astype(float)
    scale = float(np.var(factor, ddof=1))
    identified = pairs >= _FEWEST_PAIRS

    def minus_log_likelihood(point) -> float:
        variance = scale * np.exp(np.clip(point[0], -30, 30))
        decay = _decay(point[1]) if identified else 0.0
        covariance = variance * decay**gaps + np.diag(noise + 1e-9 * scale)
        try:
            root = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return np.inf
        ones, values = np.linalg.solve(root, np.stack([np.ones(len(factor)), factor], axis=1)).T
        about = ones @ ones
        left = values - ones * (ones @ values) / about
        # The last term keeps off a random walk, whose spread has no bound.
        likelihood = 2 * np.sum(np.log(np.diag(root))) + np.log(about) + left @ left
        return float(likelihood) / 2 - _OFF_ONE * np.log1p(-(decay**2))

    start = [0.0, 1.0] if identified else [0.0]
    best = min(
        (
            minimize(minus_log_likelihood, [first, *start[1:]], method="Nelder-Mead")
            for first in (0.0, -2.0)
        ),
        key=lambda found: found.fun,
    )
    point = best.x
    errors = _errors(minus_log_likelihood, point)
    deviation = float(np.sqrt(scale * np.exp(np.clip(point[0], -30, 30))))
    step = Component("step", deviation, float(deviation * errors[0] / 2))
    if not identified:
        note = f"{pairs} pairs of neighbouring steps; at least {_FEWEST_PAIRS} are needed"
        return step, Component(name, None, None, note)
    decay = _decay(point[1])
    note = "too low in a trace of so few steps" if len(factor) * (1 - decay) < 20 else ""
    # No error is more than that of knowing nothing.
    error = min(decay * (1 - decay) * errors[1], 12**-0.5)
    return step, Component(name, decay, float(error), note)


def _decay(x: float) -> float:
    return float(np.clip(1 / (1 + np.exp(-x)), 1e-6, 1 - 1e-6))


def _errors(minus_log_likelihood, point: np.ndarray) -> np.ndarray:
    """Standard errors from the curvature at the optimum, by differences."""
    step = 1e-2
    size = len(point)
    curvature = np.empty((size, size))
    axes = step * np.eye(size)
    for i in range(size):
        for j in range(size):
            corners = [
                a * b * minus_log_likelihood(point + a * axes[i] + b * axes[j])
                for a in (-1, 1)
                for b in (-1, 1)
            ]
            curvature[i, j] = sum(corners) / (4 * step**2)
    inverse = np.linalg.pinv(curvature)
    return np.sqrt(np.maximum(np.diag(inverse), 0))
