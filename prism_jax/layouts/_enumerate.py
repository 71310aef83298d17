"""Enumerates the layouts of a model on a number of GPUs."""

import contextlib
import math
from collections.abc import Iterable, Iterator

import msgspec

from .._misc import plural, whole_number
from .._progress import progress_bar
from .._summary import GIB
from ..data import Cluster, Job, Kernels, Layout, Model, ScheduleConfig, Training, load_kernels
from ..prediction import fits, least_bytes, memory, usable_bytes
from ..schedule import schedule_name
from ._space import LayoutSpace, Question, layouts_of


# How far from a number of GPUs without a layout another number is searched.
_NEAR = 1024
# The multiples of GPUs that are tried if a model does not fit.
_TIMES = (2, 4, 8, 16, 32, 64)
# How many divisors a message names.
_MOST_NAMED = 12


def enumerate_layouts(
    model: Model,
    cluster: Cluster,
    world_size: int,
    *,
    training: Training,
    batch_size: int,
    kernels: Kernels | None = None,
    space: LayoutSpace | None = None,
    any_memory: bool = False,
    memory_margin: float = 0.0,
    progress: bool = False,
) -> tuple[Job, ...]:
    """Enumerates the layouts of a model on a number of GPUs, as jobs.

    These are the layouts of a space that fit into the memory of a GPU, as computed by
    [`prism_jax.memory`][], and in which everything divides evenly: the model by tensor parallelism
    and stages, the sequence by tensor and context parallelism, the batch by replicas and
    microbatches, and the experts. They are in the order of the fields of
    [`prism_jax.LayoutSpace`][]: by `tp`, then `pp`, and so on; `recompute` changes fastest.

    **Arguments:**

    - `model`, `cluster`: the model and the machine.
    - `world_size`: how many GPUs of the cluster each layout uses.
    - `training`: how a step is computed. `microbatch_size`, `zero` and `recompute` come from the
        space instead.
    - `batch_size`: the number of sequences in a step.
    - `kernels`: the profile of the kernels; by default that of the cluster.
    - `space`: which layouts to consider.
    - `any_memory`: whether to return also those that do not fit into memory.
    - `memory_margin`: the share of what is usable of a GPU's memory that a layout must leave free.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A job for each layout. Its name describes the layout.

    **Raises:**

    `ValueError` if there are no layouts. The message says which change would give one.
    """
    space = LayoutSpace() if space is None else space
    _check(space, cluster, world_size, batch_size)
    named = tuple(dict.fromkeys(map(schedule_name, space.schedule)))
    space = msgspec.structs.replace(space, schedule=named)
    check_memory_margin(memory_margin)
    kernels = load_kernels(cluster) if kernels is None else kernels
    training = msgspec.structs.replace(training, global_batch_size=None)  # It is `batch_size`.
    question = Question(model, cluster, kernels, training, batch_size, space)
    jobs = [*layouts_of(question, world_size)]
    if not jobs:
        raise ValueError(_nothing_divides(question, world_size))
    if any_memory:
        return tuple(jobs)
    most = [usable_bytes(job) * (1 - memory_margin) for job in jobs]
    floors = {number: _bytes(job, False) for number, job in enumerate(jobs)}
    small = [number for number, floor in floors.items() if floor <= most[number]]
    needed: dict[int, float] = {}
    # Layouts with one schedule are consecutive, so that its ops are read once.
    with progress_bar(len(small), progress, "memory", "layout") as advance:
        for number in sorted(small, key=lambda i: schedule_of(jobs[i])):
            needed[number] = _bytes(jobs[number], True)
            advance(1)
    fitting = tuple(jobs[i] for i in small if needed[i] <= most[i])
    if not fitting:
        known = needed or floors
        least = min(known, key=lambda i: known[i])
        why = _too_large(
            question, world_size, jobs[least], known[least], memory_margin, bool(needed)
        )
        raise ValueError(why)
    return fitting


def schedule_of(job: Job) -> tuple:
    """A key that sorts jobs by schedule, so that the ops of each schedule are read once."""
    schedule = job.schedule
    return job.layout.pp, schedule.kind, schedule.virtual_stages, schedule.num_microbatches


def _bytes(job: Job, activations: bool) -> float:
    """The memory of the fullest GPU, or what it needs at least, without activations; infinite if
    the schedule cannot run so many microbatches.
    """
    try:
        return memory(job).fullest.bytes if activations else least_bytes(job)
    except ValueError:
        return math.inf


def _check(space: LayoutSpace, cluster: Cluster, world_size: int, batch_size: int) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(space), LayoutSpace)
    except msgspec.ValidationError as error:
        raise ValueError(f"The space of layouts cannot be used: {error}.") from None
    for name, choices in msgspec.structs.asdict(space).items():
        if choices is not None and not choices:
            raise ValueError(f"The space of layouts has no `{name}` to choose; give at least one.")
    for name, number in (("world_size", world_size), ("batch_size", batch_size)):
        whole_number(number, name)
    if world_size > cluster.num_devices:
        nodes = -(-world_size // cluster.devices_per_node)
        raise ValueError(
            f"`world_size={world_size}` is more than the {plural(cluster.num_devices, 'device')} "
            f"of the cluster `{cluster.name}`; use fewer, or a cluster of {plural(nodes, 'node')}."
        )


def check_memory_margin(margin: float) -> None:
    """Raises a `ValueError` unless a margin is a share of the memory, below 1."""
    if not 0 <= margin < 1:
        raise ValueError(f"`memory_margin={margin!r}` must be a share from 0 to less than 1.")


def _nothing_divides(question: Question, world_size: int) -> str:
    """The message if no layout divides evenly: the nearest numbers of GPUs with a layout."""
    closest: list[int] = []
    for away in range(1, _NEAR):
        for number in (world_size - away, world_size + away):
            if number > 0 and len(closest) < 2 and any(True for _ in layouts_of(question, number)):
                closest.append(number)
    fixes = [*_dividing_values(question, world_size)]
    if closest:
        fixes = [
            " or ".join([*map("{:,}".format, sorted(closest)[:-1]), plural(max(closest), "GPU")])
        ]
    nearest = f"use {', or '.join(fixes)}" if fixes else "widen it"
    return (
        f"No layout of the space divides {plural(world_size, 'GPU')}, the "
        f"{plural(question.model.num_layers, 'layer')} and the model's sizes, and a batch of "
        f"{plural(question.batch_size, 'sequence')} evenly; {nearest}, "
        "or another batch or space."
    )


def _dividing_values(question: Question, world_size: int) -> Iterator[str]:
    """For each field of which no value divides what it shares out, the values that do."""
    shared = {"tp": world_size, "pp": world_size, "cp": world_size}
    for name, number in (shared | {"microbatch_size": question.batch_size}).items():
        choices = getattr(question.space, name)
        if choices is not None and all(number % choice for choice in choices):
            divisors = [n for n in range(1, number + 1) if number % n == 0]
            or_another = " or another divisor" if len(divisors) > _MOST_NAMED else ""
            yield f"`{name}` of {', '.join(map(str, divisors[:_MOST_NAMED]))}{or_another}"


def _too_large(
    question: Question, world_size: int, least: Job, needed: float, margin: float, activations: bool
) -> str:
    """What to say where nothing fits: what fits nearest, with or without its activations, and on
    how many GPUs something would.
    """
    device = question.cluster.device
    if needed == math.inf:
        memory(least)  # Raises the error of a schedule that cannot run so many microbatches.
    # Not even all of the GPUs together hold the model if there are fewer.
    usable = usable_bytes(least)
    fewest = _bytes(_undivided(least), False) / (usable * (1 - margin))
    numbers = (n * world_size for n in _TIMES if n * world_size >= fewest)
    num_gpus = next((n for n in numbers if _any_fits(layouts_of(question, n), margin)), None)
    fix = f"use {num_gpus:,} GPUs, or " if num_gpus else "use "
    free = f" with a margin of {100 * margin:.3g} %" if margin else ""
    even, much = ("", "as much") if activations else ("even without activations, ", "more")
    return (
        f"No layout of {question.model.name or 'the model'} on {plural(world_size, 'GPU')} fits a "
        f"`{device.name}`, of which {usable / GIB:.1f} GiB are usable{free}: {even}"
        f"`{least.name}` needs least, {needed / GIB:.1f} GiB; {fix}devices with {much}."
    )


def _undivided(job: Job) -> Job:
    """The job on a single GPU, whatever its memory."""
    assert job.training is not None
    return msgspec.structs.replace(
        job,
        layout=Layout(),
        schedule=ScheduleConfig(kind="1f1b", num_microbatches=1),
        training=msgspec.structs.replace(job.training, zero=0, optimizer_instances=1),
    )


def _any_fits(jobs: Iterable[Job], margin: float) -> bool:
    """Whether a layout fits; those that keep least first, and of these the ones with the fewest
    ops, which take least time to look at.
    """

    def order(job: Job) -> tuple[int, bool, int]:
        assert job.training is not None
        size, again = job.training.microbatch_size, job.training.recompute == "full"
        return size, not again, job.layout.pp * job.schedule.num_microbatches

    for job in sorted(jobs, key=order):
        with contextlib.suppress(ValueError):  # Its schedule may not run so many microbatches.
            if fits(job, margin):
                return True
    return False
