"""The cheap setting that shortens a step most."""

import contextlib
from collections.abc import Iterator

from ..data import Job
from ._fits import Change, changed
from ._memory import memory
from ._predict import predict


# What is worth a change: a step shorter by this share.
_LEAST = 0.005


def quickest_change(job: Job) -> tuple[Change, float] | None:
    """The setting that shortens the step without variability most, of those that cost nothing: they
    keep the GPUs, the layout, the tokens and the precision, and fit the memory. And by which share;
    `None` if that is below 0.5 %.
    """
    least, found = (1 - _LEAST) * predict(job).mean, None
    for change in _settings(job):
        with contextlib.suppress(ValueError):  # The job does not allow it.
            other = changed(job, change)
            mean = predict(other).mean
            if mean < least and memory(other).fits:
                least, found = mean, change
    return None if found is None else (found, 1 - least / predict(job).mean)


def _settings(job: Job) -> Iterator[Change]:
    names = ("tp_overlap", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather")
    for name in (*names, "accumulate_gradients"):
        yield {f"training.{name}": True}
    yield {"training.zero": 1}
    for recompute in ("none", "selective"):
        yield {"training.recompute": recompute}
    for stages in (job.schedule.virtual_stages * 2, job.schedule.virtual_stages // 2):
        yield {"schedule.virtual_stages": max(stages, 1)}
