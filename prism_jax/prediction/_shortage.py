"""Whether a job needs more memory than its devices have."""

import contextlib

from .._summary import GIB
from ..data import Job
from ._memory import memory
from ._predict import with_values


# A rank holds no less with all microbatches than with so many for each pipeline rank.
_FEW = 4
# To read an order of more turns, of one microbatch in one stage, takes a second or more.
_MOST_TURNS = 200_000


def shortage(job: Job) -> str:
    """What a job needs and what is usable, without a full stop, if it needs more. Empty if it fits,
    if it says why it ran nevertheless (`allow_oom`), or if it has no model.
    """
    if job.model is None or job.cluster is None or job.training is None or job.allow_oom:
        return ""
    smallest, least, needed = _with_few(job), "", None
    if smallest is not job:
        with contextlib.suppress(ValueError):  # An order may need as many microbatches.
            needed, least = memory(smallest), "at least "
    if needed is None or needed.fits:
        needed, least = memory(job), ""
    if needed.fits:
        return ""
    fullest, usable = needed.fullest, needed.usable_bytes
    return (
        f"Job `{job.name}` needs {least}{fullest.bytes / GIB:.1f} GiB on pipeline rank "
        f"{fullest.rank}, and of a `{job.cluster.device.name}` {usable / GIB:.1f} GiB are usable"
    )


def _with_few(job: Job) -> Job:
    """The job, or if it has very many ops, with fewer microbatches, with which it needs no more
    memory; whole groups of them, as interleaved schedules need.
    """
    pp, number = job.layout.pp, job.schedule.num_microbatches
    most = _MOST_TURNS // (pp * job.schedule.virtual_stages)
    num_gpus = min(_FEW * pp, most // pp * pp or max(most, 1))
    return (
        with_values(job, {"schedule.num_microbatches": num_gpus})
        if num_gpus < number > most
        else job
    )
