"""How well a calibrated job agrees with the runs it was calibrated to."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from ..data import Job
from ._observe import core_spread
from ._scale import steps_of_kernels
from ._step_law import step_law_of


def agreement(
    job: Job, runs: Sequence[Float[np.ndarray, "_"]], *, num_samples: int = 8192
) -> dict[str, tuple[float, float]]:
    """Figures of the steps of a run: those of a calibrated job, and measured ones (the medians over
    runs).

    **Returns:**

    `p50_s`, `p95 / p50` and `core_spread`, each as a pair.
    """
    assert job.kernels is not None
    # Simulated without the factor of a step, which is independent of the rest and multiplied on.
    steps = steps_of_kernels(job, job.kernels, jax.random.key(1), num_samples)
    steps = steps * step_law_of(job.kernels).factors(len(steps))
    each = [_figures(run) for run in runs]
    ours, theirs = _figures(steps), np.median(each, axis=0)
    names = ("p50_s", "p95 / p50", "core_spread")
    return dict(zip(names, zip(ours, map(float, theirs), strict=True), strict=True))


def _figures(steps: Float[np.ndarray, " steps"]) -> tuple[float, float, float]:
    median = float(np.median(steps))
    return median, float(np.quantile(steps, 0.95)) / median, core_spread(steps)
