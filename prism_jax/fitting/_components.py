"""What makes the compute of a traced job vary, taken apart: GPUs, steps, microbatches, the rest.

    log latency = mean[stage, phase] + worker + step[t] + worker_step[worker, t]
                  + microbatch[replica, m, t] + residual,          step[t] autoregressive

Stalls are taken out first. What a worker's phases differ by, beside the worker, is a mean as well.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ..data import Component
from ._mean_squares import Logs, between_workers, noise_of_means, within
from ._means import count, mean
from ._robust import stalled
from ._step_factor import of_steps
from ._variance import ALIKE, Variance


_SWEEPS = 30
_NAMES = ("rank", "step", "step_autocorrelation", "worker_step", "microbatch", "residual")


@dataclasses.dataclass(frozen=True)
class Apart:
    """Latencies taken apart.

    **Attributes:**

    - `components`: what they vary by, all but stalls.
    - `residual`: what is each latency's own, as a logarithm. All together have the variance of the
        component, though one phase may have more of it than the other.
    """

    components: tuple[Component, ...]
    residual: Logs

    def value(self, name: str) -> float:
        """A component's standard deviation; zero where it is not told."""
        return next(c.value for c in self.components if c.name == name) or 0.0


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
    stalls = stalled(logs, (3, 4), ALIKE)
    apart = take_apart(np.where(stalls, np.nan, logs), steps)
    return (*apart.components, stall_rate(int(np.sum(stalls)), int(np.sum(~np.isnan(logs)))))


def stall_rate(number: int, of: int) -> Component:
    """The component of so many stalls of so many ops."""
    if not of:
        return Component("stall_rate", None, None, "no op takes any time")
    # The error of a count, as if there had been one more: none seen is not none.
    return Component("stall_rate", number / of, float(np.sqrt(number + 1)) / of)


def take_apart(
    body: Logs,
    steps: Int[np.ndarray, " steps"],
    step_times: Float[np.ndarray, " steps"] | None = None,
) -> Apart:
    """Takes latencies without stalls apart.

    **Arguments:**

    - `body`: logarithms of latencies; `nan` where one is missing or has stalled.
    - `steps`: the number of each step.
    - `step_times`: where they are known, `step` is what they have of the factor of steps, which is
        one on every op. See `of_steps`.
    """
    if np.isnan(body).all():
        none = tuple(Component(name, None, None, "no op takes any time") for name in _NAMES)
        return Apart(none, body)
    body = body - mean(body, (0, 3, 4))
    worker, step = _main_effects(body)
    rest = body - worker - step
    rest = rest - mean(rest, (3, 4))
    residual, worker_step, microbatch = variances = within(rest)
    noise = noise_of_means(body, (0, 1, 2, 3), variances).reshape(-1)
    there = count(body, (0, 1, 2, 3)).reshape(-1) > 0
    times = None if step_times is None else step_times[there]
    found = (
        between_workers(body, step, variances),
        *of_steps(step.reshape(-1)[there], noise[there], steps[there], times),
        worker_step.component("worker_step"),
        microbatch.component("microbatch"),
        residual.component("residual"),
    )
    return Apart(found, _own(rest, residual, worker_step, microbatch))


def _main_effects(body: Logs) -> tuple[np.ndarray, np.ndarray]:
    """Effects of workers, `(replicas, stages, 1, 1, 1)`, and of steps, by least squares."""
    worker, step = np.zeros((1,) * 5), np.zeros((1,) * 5)
    for _ in range(_SWEEPS if np.isnan(body).any() else 1):
        worker = mean(body - step, (2, 3, 4))
        step = mean(body - worker, (0, 1, 2, 3))
    return worker, step


def _own(rest: Logs, residual: Variance, worker_step: Variance, microbatch: Variance) -> Logs:
    """What is left without the likely effects of microbatches and of a worker's step, all together
    of the residual's variance. What has no variance has no effect.
    """
    for variance, axes in ((microbatch, (1, 2)), (worker_step, (2, 3))):
        noise = residual.known / np.maximum(count(rest, axes), 1)
        likely = variance.known / np.maximum(variance.known + noise, ALIKE**2)
        rest = rest - likely * mean(rest, axes)
    square = float(np.nanmean(rest**2))
    return rest * np.sqrt(residual.known / square) if square > ALIKE**2 else 0 * rest
