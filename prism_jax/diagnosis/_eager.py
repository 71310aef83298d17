"""The kernels of plain PyTorch in a profile beside those of the lists of operators, by class; and
the job with what one profile has measured of its machine.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import msgspec

from .._summary import Column, Table
from ..data import Calibrated, Job, Operators, kernels_of
from ..lowering import job_parts
from ..prediction import predict
from ..trace import Contents
from ..workload import Block, Kernel, lower, rows_of


# A class whose kernels take less time of a step than this share keeps its rates.
_SMALL = 1e-3
# A step is bound by its host if one twice as fast makes it shorter by this share. Of kernels alone
# it is as long as in the profile, unless it is shorter by another.
_BOUND, _TOO_SHORT = 0.05, 0.8
_OTHERS = "others"


@dataclasses.dataclass(frozen=True)
class KernelClass:
    """The kernels of a class in one step.

    **Attributes:**

    - `name`: the class, as the lists of operators name it; `others` fit none of them.
    - `kinds`: the kinds of kernels of the lists that are of this class.
    - `predicted`, `measured`: how many there are; zero if there is no counterpart.
    - `predicted_s`, `measured_s`: how long they take, in seconds.
    """

    name: str
    kinds: tuple[str, ...]
    predicted: float
    predicted_s: float
    measured: float
    measured_s: float


def kernel_classes(job: Job, profiled: Contents) -> tuple[KernelClass, ...]:
    """Each class of kernels of a step, as predicted and as measured, those that take longest first;
    none for a job without lists of operators.

    **Arguments:**

    - `job`: from `load_job`, with a model and a cluster, on a pipeline of one rank.
    - `profiled`: from `contents`.
    """
    lists = None if job.kernels is None else job.kernels.operators
    if lists is None or job.layout.pp > 1 or not profiled.steps:
        return ()
    by_name = {name: [0.0] * 4 for name in (*lists.classes, _OTHERS)}
    for kernel, number in _kernels_of(job):
        sums = by_name[_class_of_kind(lists, kernel)]
        sums[0] += number
        sums[1] += number * kernel.mean
    calls = sum(len(rank.step_numbers) for rank in profiled.by_rank or (profiled,))
    for pool in profiled.kernels:
        fit = (n for n, (names, _) in lists.classes.items() if re.search(names, pool.name))
        sums = by_name[next(fit, _OTHERS)]
        sums[2] += pool.calls / calls
        sums[3] += pool.total_s / calls
    classes = [
        KernelClass(name, tuple(lists.classes.get(name, ("", ""))[1].split()), *sums)
        for name, sums in by_name.items()
        if any(sums)
    ]
    return tuple(sorted(classes, key=lambda kernels: -max(kernels.predicted_s, kernels.measured_s)))


def classes_table(classes: Iterable[KernelClass]) -> Table:
    """The classes as a table."""

    def number(key: str) -> Column:
        return Column(f"{key} kernels", lambda row: getattr(row, key) or None, ".4g")

    def seconds(key: str) -> Column:
        return Column(key, lambda row: getattr(row, f"{key}_s") or None, ".4g", "ms", scale=1e3)

    columns = ("class", "name"), number("predicted"), number("measured")
    columns = (Column(*columns[0]), *columns[1:], seconds("predicted"), seconds("measured"))
    title = "Kernels of a step by class; those without a number have no counterpart"
    return Table(columns, [*classes], title)


def calibrated_to_profile(
    job: Job, profiled: Contents, source: str, step_time_s: float | None = None
) -> tuple[Job, str]:
    """The job with the rates of kernels that a profile of it has measured, with the gaps between
    them, and the time that the host takes; and where that is from.

    A profiler slows the host, so that what it takes follows from a step time without one: what
    launches take is scaled until the step is as long. Without one it stays as it is.

    **Raises:**

    `ValueError` of one sentence if the job has no lists of operators, if no step is in the profile,
    or if no host makes a step as long.
    """
    classes = kernel_classes(job, profiled)
    if not profiled.steps:
        raise ValueError(
            "The profile has no whole step, or is cut off; give one of two steps or more."
        )
    if not classes:
        raise ValueError(
            "A profile of whole steps calibrates jobs of plain PyTorch on one pipeline rank; give "
            "one whose `training.software` is such a stack, or measured steps by `--to`."
        )
    measured_s = sum(kernels.measured_s for kernels in classes)
    # What the device is idle between kernels that are launched in time is a part of each of them.
    idle = sum(part.seconds for part in profiled.idle if part.cause == "device")
    gap = idle / sum(kernels.measured for kernels in classes)
    rates = {
        kind: (kernels.measured_s + gap * kernels.predicted) / kernels.predicted_s
        for kernels in classes
        if min(kernels.predicted_s, kernels.measured_s) > _SMALL * measured_s
        for kind in kernels.kinds
    }
    job = msgspec.structs.replace(job, calibrated=Calibrated(source, rates=rates))
    job = msgspec.structs.replace(job, kernels=kernels_of(job))
    if step_time_s is None:
        return job, "what launches take is that of the stack, since a profiler slows the host"
    return _with_host(job, step_time_s)


def _with_host(job: Job, step_time_s: float) -> tuple[Job, str]:
    """The job whose host takes so long for launches that a step takes so long."""

    def at(factor: float) -> Job:
        assert job.training is not None
        names = ("host_forward_s", "host_backward_s")
        slower = {name: factor * getattr(job.training, name) for name in names}
        training = msgspec.structs.replace(job.training, **slower)
        return msgspec.structs.replace(job, training=training)

    def seconds_at(factor: float) -> float:
        return predict(at(factor)).mean

    low, high = 0.1, 10.0
    shortest, longest = map(seconds_at, (low, high))
    if not _TOO_SHORT * shortest < step_time_s < longest:
        raise ValueError(
            f"The step time is {step_time_s:.4g} s, but such a step takes {shortest:.4g} s if the "
            f"host is ten times as fast, and {longest:.4g} s if it is ten times as slow; give the "
            "seconds of a step without the profiler, or the job that was profiled."
        )
    while high > 1.001 * low:
        factor = (low * high) ** 0.5
        low, high = (low, factor) if seconds_at(factor) > step_time_s else (factor, high)
    factor = (low * high) ** 0.5
    if step_time_s - seconds_at(factor / 2) < _BOUND * step_time_s:
        return job, (
            "what launches take is that of the stack, since the device does not wait for the host "
            "in these steps"
        )
    assert job.training is not None
    launch_us = 1e6 * factor * job.training.host_forward_s
    return at(factor), (
        f"what launches take follows from the step time: {launch_us:.3g} us for a forward's kernel"
    )


def _kernels_of(job: Job) -> Iterator[tuple[Kernel, float]]:
    """The kernels of a step of a rank, with their numbers."""
    work, rounds = lower(job_parts(job), [0]), job.schedule.num_microbatches
    blocks: list[tuple[Block, int]] = [(work.forward[0], rounds), (work.backward[0], rounds)]
    for block, times in (*blocks, (work.tail, 1)):
        for segment, repeats in block:
            for row, by_member in rows_of(segment):
                for kernel, number in row:
                    if kernel.kind != "host" and by_member:
                        yield kernel, times * repeats * number


def _class_of_kind(lists: Operators, kernel: Kernel) -> str:
    kind = kernel.size.rpartition(" ")[2] if "B " in kernel.size else kernel.kind
    fit = (n for n, (_, kinds) in lists.classes.items() if {kind, kernel.kind} & {*kinds.split()})
    return next(fit, _OTHERS)
