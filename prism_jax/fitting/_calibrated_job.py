"""A job with other laws of its kernels."""

from collections.abc import Sequence

import msgspec

from ..data import (
    Calibrated,
    Job,
    Variation,
    apply_calibrated,
    load_kernels,
    replace_variations,
)


def without_calibration(job: Job, source: str) -> Job:
    """The job without what an earlier calibration has said, but with the changes that were made to
    its kernels since (by `--set`).
    """
    assert job.cluster is not None
    assert job.kernels is not None
    known = list(load_kernels(job.cluster).variability)
    if job.calibrated is not None:
        known += job.calibrated.variability
    changed = tuple(v for v in job.kernels.variability if v not in known)
    return _calibrated(job, Calibrated(source, 1.0, changed))


def with_laws(job: Job, laws: Sequence[Variation]) -> Job:
    """A calibrated job with these laws in place of those for the same component of the same
    kind.
    """
    assert job.calibrated is not None
    new = replace_variations(job.calibrated.variability, laws)
    return _calibrated(job, msgspec.structs.replace(job.calibrated, variability=new))


def with_compute(job: Job, factor: float) -> Job:
    """A calibrated job with this factor on the mean latency of compute."""
    assert job.calibrated is not None
    return _calibrated(job, msgspec.structs.replace(job.calibrated, compute=factor))


def _calibrated(job: Job, calibrated: Calibrated) -> Job:
    assert job.cluster is not None
    kernels = apply_calibrated(load_kernels(job.cluster), calibrated, "calibrated")
    return msgspec.structs.replace(job, calibrated=calibrated, kernels=kernels)
