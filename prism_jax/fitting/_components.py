"""What makes the compute of a traced job vary, taken apart: GPUs, steps, microbatches, the rest.

    log latency = mean[stage, phase] + worker + step[t] + worker_step[worker, t]
                  + microbatch[replica, m, t] + residual,          step[t] autoregressive

Variances are estimated by equating mean squares with their expectations (unweighted means where
data are missing; Searle, Casella and McCulloch, "Variance Components", 1992, ch. 5), the step's
variance and autocorrelation by restricted maximum likelihood. Stalls are taken out first.
"""

import dataclasses
import functools as ft
import math

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
# Equations of a larger condition number have no solution.
_SINGULAR = 1e8
# Latencies whose logarithms differ by no more are alike: rounding.
_ALIKE = 1e-9
# The log-likelihood that a step's factor must add to be seen: two standard errors.
_SEEN = 2.0

_NAMES = (
    *("rank", "step", "step_autocorrelation", "worker_step", "microbatch", "residual"),
    "stall_rate",
)

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
    if np.isnan(logs).all():
        return tuple(Component(name, None, None, "no op takes any time") for name in _NAMES)
    body, stalls = _without_stalls(logs)
    body = body - _mean(body, (0, 3, 4))
    worker, step = _main_effects(body)
    rest = body - worker - step
    residual, worker_step, microbatch = _within(rest)
    rank = _between_workers(body, step, (residual, worker_step, microbatch))
    noise = _noise_of_steps(body, (residual, worker_step, microbatch))
    there = _count(body, (0, 1, 2, 3)).reshape(-1) > 0
    return (
        rank,
        *_of_steps(step.reshape(-1)[there], noise[there], steps[there]),
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
        if max(self.known, self.error) <= _ALIKE**2:
            return Component(name, None, None, "no spread at all is seen")
        deviation = float(np.sqrt(self.known))
        # Near zero the deviation is known to the root of what its square is.
        error = self.error / (2 * max(deviation, np.sqrt(self.error)))
        return Component(name, deviation, float(error), self.note)


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of what is there; zero where nothing is."""
    there = ~np.isnan(values)
    number = np.sum(there, axis=axes, keepdims=True)
    return np.sum(np.where(there, values, 0), axis=axes, keepdims=True) / np.maximum(number, 1)


def _count(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sum(~np.isnan(values), axis=axes, keepdims=True)


def _without_stalls(logs: Logs) -> tuple[Logs, Component]:
    # A median of nothing is a warning: where a worker has no op of a phase, that of zeros.
    some = ~np.isnan(logs).all(axis=(3, 4), keepdims=True)
    centre = np.nanmedian(np.where(some, logs, 0), axis=(3, 4), keepdims=True)
    distance = np.where(some, np.abs(logs - centre), 0)
    away = np.nanmedian(distance, axis=(3, 4), keepdims=True)
    stalled = logs - centre > np.maximum(_STALL_DEVIATIONS * 1.4826 * away, _ALIKE)
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
    means = np.where(number > 0, of_microbatch, np.nan)
    if np.isnan(within).all():
        told = _Variance(None, note="a microbatch has one op, from which it is not told")
        both = dataclasses.replace(_of_microbatches(means, 0.0), note="with what its op has")
        return told, told, both if both.value is not None else told
    mine = _count(within, (2,))
    cells = _count(within, (2, 3))
    total = float(np.nanmean(within**2))
    between = float(np.sum(_mean(within, (2, 3)) ** 2) / max(np.sum(cells > 0), 1))
    # Workers have lost their mean over the steps.
    if steps > 1:
        total, between = total + between / (steps - 1), between * steps / (steps - 1)
    expected = _expected_squares(mine, np.where(number > 1, number, 0), cells)
    op_df = max(float(np.sum(np.maximum(number - 1, 0))), 1.0)
    if np.linalg.cond(expected) < _SINGULAR:
        worker_own, own = np.linalg.solve(expected, [between, total])
        df = max(float(np.sum(cells > 0)) * expected[0, 0] - rest.shape[0] * rest.shape[1], 1.0)
        worker_step = _Variance(worker_own, between / expected[0, 0] * np.sqrt(2 / df))
    else:
        own = total / expected[1, 1]
        note = "what a worker has in one step is not told from what its replica or its op has"
        worker_step = _Variance(None, note=note)
    residual = _Variance(own, own * np.sqrt(2 / op_df))
    own = residual.known * float(np.mean(1 / number[number > 0]))
    return residual, worker_step, _of_microbatches(means, own)


def _of_microbatches(means: np.ndarray, noise: float) -> _Variance:
    """The variance of microbatches, from their means over the ops of a replica in a step. They
    share all else, but for noise.
    """
    number = _count(means, (3,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return _Variance(None, note="one microbatch in a step")
    spread = np.where(number > 1, means - _mean(means, (3,)), np.nan)
    square = float(np.nansum(spread**2)) / df
    return _Variance(square - noise, square * np.sqrt(2 / df))


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
    scale = float(np.var(factor, ddof=1)) if len(factor) > 2 else 0.0
    if scale <= _ALIKE**2:
        note = "fewer than three steps" if len(factor) < 3 else "all steps are alike"
        return Component("step", None, None, note), Component(name, None, None, note)
    gaps, which = np.unique(np.diff(steps, prepend=steps[0]), return_inverse=True)
    # Numbers of Python are many times faster than those of arrays, one at a time.
    rows = (factor.tolist(), (noise + 1e-9 * scale).tolist(), which.tolist())
    likelihood = ft.partial(_minus_log_likelihood, rows, gaps.astype(float))

    def objective(point) -> float:
        # The last term keeps off a random walk, whose spread has no bound.
        decay = _decay(point[1])
        return likelihood(_variance(point[0]), decay) - _OFF_ONE * math.log1p(-(decay**2))

    def _variance(x: float) -> float:
        return scale * math.exp(min(max(x, -30.0), 30.0))

    best = None
    if pairs < _FEWEST_PAIRS:
        note = f"{pairs} pairs of neighbouring steps; at least {_FEWEST_PAIRS} are needed"
    else:
        found = [minimize(objective, [x, 1.0], method="Nelder-Mead") for x in (0.0, -2.0)]
        best = min(found, key=lambda one: one.fun)
        note = "" if likelihood(0.0, 0.0) - best.fun > _SEEN else "no factor of steps is seen"
    if best is None or note:
        # Steps that do not remember: of their variance the information is known.
        alone = minimize(lambda x: likelihood(_variance(x[0]), 0.0), [-1.0], method="Nelder-Mead")
        variance = _variance(alone.x[0]) if alone.fun < likelihood(0.0, 0.0) else 0.0
        total = variance + np.asarray(rows[1])
        error = float(np.sqrt(2 / np.sum(total**-2.0) * len(total) / (len(total) - 1)))
        return _Variance(variance, error).component("step"), Component(name, None, None, note)
    variance, decay = _variance(best.x[0]), _decay(best.x[1])
    errors = _errors(lambda x, r: likelihood(variance * math.exp(x), r), decay)
    note = "too low in a trace of so few steps" if len(factor) * (1 - decay) < 20 else ""
    step = _Variance(variance, variance * errors[0]).component("step")
    return step, Component(name, decay, errors[1], note)


def _minus_log_likelihood(
    rows: tuple[list[float], list[float], list[int]],
    gaps: Float[np.ndarray, " gaps"],
    variance: float,
    decay: float,
) -> float:
    """Minus the restricted log-likelihood of an autoregressive process with a mean, seen in noise,
    up to a constant: by a Kalman filter of the values and of ones, which have the same gains.

    **Arguments:**

    - `rows`: of each step: its value, the variance of its noise, and the position of what it is
        away from the step before it in `gaps`.
    - `gaps`: the first is zero.
    - `variance`, `decay`: of the process, and how much of it is left after one step.
    """
    left = (decay**gaps).tolist()
    value = one = 0.0  # What is expected of the next step.
    spread = variance
    logs = of_values = of_both = of_ones = 0.0
    for given, noise, which in zip(*rows, strict=True):
        decayed = left[which]
        value, one = decayed * value, decayed * one
        spread = decayed * decayed * spread + variance * (1 - decayed * decayed)
        total = spread + noise
        gain = spread / total
        new, new_one = given - value, 1 - one
        logs += math.log(total)
        of_values += new * new / total
        of_both += new * new_one / total
        of_ones += new_one * new_one / total
        value += gain * new
        one += gain * new_one
        spread *= 1 - gain
    return (logs + math.log(of_ones) + of_values - of_both**2 / of_ones) / 2


def _decay(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -13.8), 13.8)))  # From 1e-6 to 1 - 1e-6.


def _errors(likelihood, decay: float) -> tuple[float, float]:
    """Standard errors of the logarithm of the variance, at zero, and of the decay, from the
    curvature by differences; that of the decay is no more than that of knowing nothing.
    """
    # The decay may pass zero, but not one.
    steps = np.diag([1e-2, min(1e-2, (1 - decay) / 10)])
    point = np.array([0.0, decay])
    curvature = np.empty((2, 2))
    for i in range(2):
        for j in range(2):
            corners = [
                a * b * likelihood(*(point + a * steps[i] + b * steps[j]))
                for a in (-1, 1)
                for b in (-1, 1)
            ]
            curvature[i, j] = sum(corners) / (4 * steps[i, i] * steps[j, j])
    nothing = 12**-0.5
    if np.min(np.linalg.eigvalsh(curvature)) <= 0:
        return 1.0, nothing
    of_variance, of_decay = np.sqrt(np.diag(np.linalg.inv(curvature)))
    return float(of_variance), min(float(of_decay), nothing)
