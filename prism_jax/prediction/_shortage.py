"""Whether a job needs more memory than its devices have."""

import contextlib

from .._summary import GIB
from ..data import Job
from ._memory import Memory, memory
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
    needed, least = _needed(job)
    if needed.fits:
        return ""
    fullest = needed.fullest
    return (
        f"Job `{job.name}` needs {least}{fullest.bytes / GIB:.1f} GiB on pipeline rank "
        f"{fullest.rank}, and of a `{job.cluster.device.name}` {needed.usable_bytes / GIB:.1f} GiB "
        "are usable"
    )


def _needed(job: Job) -> tuple[Memory, str]:
    """The memory of a job. If it has very many ops and fewer of them need too much memory, theirs,
    with the words `at least`.
    """
    schedule = job.schedule
    if job.layout.pp * schedule.virtual_stages * schedule.num_microbatches > _MOST_TURNS:
        with contextlib.suppress(ValueError):  # An order may need as many microbatches.
            if not (least := memory(_with_few(job))).fits:
                return least, "at least "
    return memory(job), ""


def _with_few(job: Job) -> Job:
    """The job with fewer microbatches, which needs no more memory; whole groups of them, as
    interleaved schedules need.
    """
    pp, number = job.layout.pp, job.schedule.num_microbatches
    most = _MOST_TURNS // (pp * job.schedule.virtual_stages)
    few = min(_FEW * pp, most // pp * pp or max(most, 1))
    return with_values(job, {"schedule.num_microbatches": few}) if few < number else job
