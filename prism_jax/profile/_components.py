"""Splits the variability of a traced job's compute into GPUs, steps, microbatches and the rest.

    log latency = mean[stage, phase] + worker + step[t] + worker_step[worker, t]
                  + log(1 + loading[stage, phase] (f[replica, m, t] - 1)) + residual,

where `step` is autoregressive and `f` is the factor of a microbatch's data. Stalls are removed
first. Differences between the phases of a worker, beyond its own effect, are part of the means.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from .._estimate import count, mean
from ._clean import Clean
from ._data_factor import (
    DataFactor,
    Logs,
    compute_logs,
    find_factor,
    find_loadings,
    log_mean,
    main_effects,
    no_factor,
)
from ._effects import (
    ALIKE,
    OfSteps,
    Variance,
    inner_variances,
    separated,
)
from ._observe import Seen
from ._profile import Component
from ._step_factor import of_steps
from ._step_graph import ByKind


# Iterations: loadings separate data from workers and steps, and are estimated from the rest.
_ROUNDS = 3
_NAMES = ("rank", "step", "step_autocorrelation", "worker_step", "microbatch", "residual")


@dataclasses.dataclass(frozen=True)
class Apart:
    """Latencies, split into components.

    **Attributes:**

    - `components`: the components of variability, except stalls: the standard deviations of
        logarithms, which are relative spreads, with their standard errors. `step_autocorrelation`
        is that of the factors of consecutive steps; it is too low in traces that are not many times
        `1 / (1 - autocorrelation)` steps long.
    - `spread`: the standard deviation by the name of a component; zero if it cannot be estimated.
    - `residual`: the residual of each latency, as a logarithm. All residuals together have the
        variance of the component, although one phase may have more than another.
    - `data`: the factor of each microbatch, with the variance of its component, and the loadings.
    """

    components: tuple[Component, ...]
    spread: dict[str, float]
    residual: Logs
    data: DataFactor


@dataclasses.dataclass(frozen=True)
class Split:
    """The components of the latencies of compute, and the means of kinds on workers, in seconds, at
    a factor of its microbatch's data of one; zero where a worker has no such op.
    """

    apart: Apart
    mean: ByKind


def split_compute(seen: Seen, clean: Clean) -> Split:
    """Splits the latencies of compute into components; the means are those of kinds on workers."""
    phases, body = seen.step.phases, dict(clean.body)
    logs = compute_logs([body[kind] for kind in phases])
    apart = take_apart(logs, seen.trace.steps, seen.step_times)
    for phase, kind in enumerate(phases):
        body[kind] = body[kind] / apart.data.relative[:, :, phase]
    means = {kind: mean(x, (2, 3)) for kind, x in body.items()}
    return Split(apart, means)


def take_apart(
    logs: Logs, steps: Int[np.ndarray, " steps"], step_times: OfSteps | None = None
) -> Apart:
    """Splits latencies without stalls into components.

    **Arguments:**

    - `logs`: logarithms of latencies; `nan` where one is missing or has stalled.
    - `steps`: the number of each step, increasing; there may be gaps.
    - `step_times`: if they are known, `step` is the part of the factor of steps that they show,
        because this factor acts on every op. See `of_steps`.
    """
    if np.isnan(logs).all():
        none = tuple(Component(name, None, None, "no op takes any time") for name in _NAMES)
        return Apart(none, dict.fromkeys(_NAMES, 0.0), logs, no_factor(logs))
    body = logs - log_mean(logs, (0, 3, 4))
    there, present = ~np.isnan(body), count(body, (0, 1, 2, 3)).reshape(-1) > 0
    # At first as if everything that ops of a worker or a step share were persistent; then with
    # loadings, by which data are separated from workers and steps.
    effects, common = main_effects(body)
    loadings = find_loadings(body - effects - common)
    for _ in range(_ROUNDS):
        loadings, worker, rank, step, data_of_step = separated(body, effects, loadings)
    deviations = body - worker - step.by_group
    times = None if step_times is None else step_times[present]
    of_step, memory = of_steps(step.factor[present], step.noise[present], steps[present], times)
    rough = find_factor(deviations, loadings)
    (residual, worker_step), remaining = inner_variances(deviations, rough)
    if loadings is None:
        data = rough
        microbatch = _between_microbatches(deviations - mean(deviations, (3, 4)), residual)
    else:
        noises = residual.known, worker_step.known
        microbatch, data = _of_data(rough, there, noises, data_of_step)
    inner = {"worker_step": worker_step, "microbatch": microbatch, "residual": residual}
    components = (rank, of_step, memory, *(x.component(name) for name, x in inner.items()))
    spread = {c.name: c.value or 0.0 for c in components}
    own = _own(remaining, data.slopes(there), residual, worker_step)
    return Apart(components, spread, own, data)


def _between_microbatches(logs: Logs, residual: Variance) -> Variance:
    """The variance of microbatches that have no factor of data: zero, unless it cannot be separated
    from the residual. Its error is that of means over their ops in a replica and a step, which
    share everything else.
    """
    note = "" if residual.value is not None else "with the residual of its op"
    ops, means = count(logs, (1, 2)), np.where(count(logs, (1, 2)) > 0, mean(logs, (1, 2)), np.nan)
    number = count(means, (3,))
    df = float(np.sum(np.maximum(number - 1, 0)))
    if df == 0:
        return Variance(None, note=note or "one microbatch in a step")
    spread = np.where(number > 1, means - mean(means, (3,)), np.nan)
    square = float(np.nansum(spread**2)) / df
    own_variance = residual.known * float(np.mean(1 / ops[ops > 0]))
    value = 0.0 if residual.value is not None else square - own_variance
    return Variance(value, square * np.sqrt(2 / df), note, own_variance * np.sqrt(2 / df))


def _of_data(
    data: DataFactor, there: np.ndarray, noises: tuple[float, float], by_step: np.ndarray
) -> tuple[Variance, DataFactor]:
    """The variance of the logarithm of the factor of a microbatch, and the factor with this spread,
    both without the noise of ops and of a worker's step.
    """
    seen = there.any(axis=(1, 2), keepdims=True)
    values, middle = data.factor[seen], data.factor[seen].mean()
    slopes = data.slopes(there)
    square = np.sum(slopes**2, axis=(1, 2), keepdims=True)
    by_stage = np.sum(np.sum(slopes, axis=2, keepdims=True) ** 2, axis=(1, 2), keepdims=True)
    noise = noises[0] * float(np.mean(1 / square[seen]))
    noise += noises[1] * float(np.mean(by_stage[seen] / square[seen] ** 2))
    # Within a step and between steps, after the factor of steps has taken their common part.
    factor = np.where(seen, data.factor, np.nan)
    inner = factor - mean(factor, (0, 3))
    total = float(np.nanmean(inner**2) + np.mean(by_step[count(factor, (0, 3)).reshape(-1) > 0]))
    own = max(total - noise, 0.0)
    # Each replica's step counts as one draw, because its microbatches are not independent.
    sums = np.nansum(inner**2 - np.nanmean(inner**2), axis=3)
    error = float(np.sqrt(np.sum(sums**2))) / len(values)
    shrunk = 1 + (data.factor / middle - 1) * np.sqrt(own / max(total, 1e-300))
    relative = own / middle**2
    variance = Variance(float(np.log1p(relative)), error / middle**2 / (1 + relative))
    # The same law of relative latencies, with a factor of mean one in place of `middle`.
    loadings = data.loadings * middle / (1 + data.loadings * (middle - 1))
    return variance, DataFactor(loadings, shrunk)


def _own(left: Logs, slopes: np.ndarray, residual: Variance, worker_step: Variance) -> Logs:
    """The rest without the likely effects of a worker's step, scaled to the residual's variance.
    Without variance there is no effect.
    """
    # The estimated factor of a microbatch has absorbed a part of its ops, by their slopes.
    taken = slopes**2 / np.maximum(np.sum(slopes**2, axis=(1, 2), keepdims=True), 1e-300)
    left = left / np.sqrt(np.maximum(1 - taken, 0.1))
    noise = residual.known / np.maximum(count(left, (2, 3)), 1)
    likely = worker_step.known / np.maximum(worker_step.known + noise, ALIKE**2)
    left = left - likely * mean(left, (2, 3))
    square = float(np.nanmean(left**2))
    return left * np.sqrt(residual.known / square) if square > ALIKE**2 else 0 * left
