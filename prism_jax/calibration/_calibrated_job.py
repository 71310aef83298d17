"""Replaces the laws of a job's kernels."""

from collections.abc import Sequence

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import (
    Calibrated,
    Job,
    Uncertainty,
    Variation,
    apply_calibrated,
    load_kernels,
    replace_variations,
)


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
    return _calibrated(job, Calibrated(source, variability=changed))


def with_laws(job: Job, laws: Sequence[Variation]) -> Job:
    """A calibrated job in which these laws replace those for the same component and kind."""
    assert job.calibrated is not None
    new = replace_variations(job.calibrated.variability, laws)
    return _calibrated(job, msgspec.structs.replace(job.calibrated, variability=new))


def with_level_of(job: Job, values: Float[np.ndarray, "4"], num_replicas: int) -> Job:
    """A calibrated job with this level; see `Level`."""
    assert job.calibrated is not None
    compute, network, constant, growth = (float(x) for x in values)
    changed = msgspec.structs.replace(
        job.calibrated,
        compute=float(np.exp(compute)),
        network=float(np.exp(network)),
        constant_s=constant,
        growth=growth,
        num_replicas=num_replicas,
    )
    return _calibrated(job, changed)


def with_uncertainty(job: Job, uncertainty: Uncertainty) -> Job:
    """A calibrated job with this uncertainty."""
    assert job.calibrated is not None
    return _calibrated(job, msgspec.structs.replace(job.calibrated, uncertainty=uncertainty))


def calibrated_as(job: Job, other: Job) -> Job:
    """The job with the calibration of another, in place of its own."""
    assert other.calibrated is not None
    return _calibrated(job, other.calibrated)


def _calibrated(job: Job, calibrated: Calibrated) -> Job:
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)
