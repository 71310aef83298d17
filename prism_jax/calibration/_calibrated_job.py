"""A calibrated job: the changes to its kernels, and how well it agrees with measured runs."""

from collections.abc import Sequence

import jax
import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Calibrated, Job, apply_calibrated, load_kernels
from ._observe import core_spread
from ._scale import steps_of_kernels
from ._step_law import step_law_of


def without_calibration(job: Job, source: str) -> Job:
    """The job without an earlier calibration, but with the changes that were made to its kernels
    since then (by `--set`).
    """
    if job.cluster is None or job.kernels is None:
        return job
    known = list(load_kernels(job.cluster).variability)
    if job.calibrated is not None:
        known += job.calibrated.variability
    changed = tuple(v for v in job.kernels.variability if v not in known)
    return with_calibrated(job, Calibrated(source, variability=changed))


def with_calibrated(job: Job, calibrated: Calibrated) -> Job:
    """The job with these changes to the kernels of its cluster."""
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)


def calibrated_as(job: Job, other: Job) -> Job:
    """The job with the calibration of another, in place of its own."""
    assert other.calibrated is not None
    return with_calibrated(job, other.calibrated)


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
