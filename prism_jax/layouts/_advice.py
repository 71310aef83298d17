"""The best layout for a job that does not fit, on the same GPUs."""

import contextlib
import itertools as it
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from .._summary import GIB
from ..analysis import Mean
from ..data import Job, toml_value
from ..lowering import parts_of
from ..prediction import fits, least_bytes, shortage, usable_bytes, with_values
from ..workload import layers_of_stages
from ._rank import rank_layouts
from ._ranking import RankedLayout
from ._space import LayoutSpace, Question, layouts_of, steps_of


# For how long a layout is searched, and which share of what is usable it leaves free.
_SECONDS, _MARGIN = 1.7, 0.05
# To look at a layout with more microbatches, each once for each stage, takes a quarter of a second.
_MOST_TURNS = 50_000


def check_memory(job: Job) -> None:
    """Raises a `ValueError` of one sentence if a job needs more memory than is usable of its
    devices. The message says where, and which layout fits on the same GPUs. A job without a model
    passes.
    """
    if not (lacking := shortage(job)):
        return
    use = "use more GPUs, as no layout that was looked at fits these"
    if (best := best_on_same_gpus(job)) is not None:
        sets = " ".join(_as_set(key, value) for key, value in changes_to(job, best.job).items())
        size, seconds = best.memory_bytes / GIB, best.prediction.mean
        use = f"use `{sets}` ({size:.1f} GiB, {seconds:.4g} s a step)"
    raise ValueError(f"{lacking}; {use}, or go on with `--allow-oom`.")


def _as_set(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else toml_value(value).replace(" ", "")
    return f'--set "{key}={text}"' if "[" in text else f"--set {key}={text}"


def best_on_same_gpus(job: Job, seconds: float = _SECONDS) -> RankedLayout | None:
    """The layout with the shortest predicted step that fits on the GPUs of a job, of those that a
    search knows after some seconds; `None` if it knows none.
    """
    began = time.monotonic()
    listed_until, looked_at_until, ends = (began + seconds * share for share in (0.3, 0.8, 1))
    of, own, gpus = parts_of(job), job.layout, job.layout.world_size
    space = LayoutSpace(
        tp=_by_nearness(own.tp, min(of.cluster.links[0].group, gpus)),
        pp=_by_nearness(own.pp, min(of.model.num_layers, gpus)),
        schedule=(*dict.fromkeys((job.schedule.kind, "1f1b", "interleaved-1f1b")),),
        recompute=(*dict.fromkeys((of.training.recompute, "none", "selective", "full")),),
    )
    asked = Question(of.model, of.cluster, of.kernels, of.training, job.batch_size, space)
    # Its own stages may not divide the layers evenly.
    found = it.chain(steps_of(asked, own, job.schedule), layouts_of(asked, gpus))
    listed = [*it.takewhile(lambda _: time.monotonic() < listed_until, found)]
    fitting = _fitting(sorted(listed, key=_distance_from(job)), looked_at_until)
    # The nearest first, because a search of all may take longer.
    known, number = list[RankedLayout](), 16
    while near := [*it.islice(fitting, number)]:
        left = max(ends - time.monotonic(), 0.0)
        with contextlib.suppress(ValueError):  # None is known in time.
            ranking = rank_layouts(near, Mean(), num_samples=None, top=1, budget=left)
            if ranking.ended == "interrupted":
                raise KeyboardInterrupt
            if fits(with_values(job, changes_to(job, ranking.layouts[0].job))):
                known.append(ranking.layouts[0])
        number *= 4
    return min(known, key=lambda one: one.prediction.mean, default=None)


def _by_nearness(own: int, most: int) -> tuple[int, ...]:
    return tuple(sorted(range(1, most + 1), key=lambda degree: abs(math.log(degree / own))))


def _fitting(jobs: Iterable[Job], ends: float) -> Iterator[Job]:
    """The jobs that fit, until a time. Jobs that only keep other activations share the other parts
    of their memory.
    """
    known: dict[tuple[Any, ...], bool] = {}
    for job in it.takewhile(lambda _: time.monotonic() < ends, jobs):
        schedule = msgspec.structs.replace(job.schedule, num_microbatches=1)
        key = job.layout, schedule, job.training and job.training.zero
        if key not in known:
            known[key] = False
            with contextlib.suppress(ValueError):
                known[key] = least_bytes(job) <= usable_bytes(job)
        turns = job.layout.pp * schedule.virtual_stages * job.schedule.num_microbatches
        with contextlib.suppress(ValueError):
            if known[key] and turns <= _MOST_TURNS and fits(job, _MARGIN):
                yield job


def _distance_from(job: Job) -> Callable[[Job], float]:
    """How much changes: a factor of two of a degree counts as much as another kind, and as one of
    16 of the size of microbatches.
    """

    def place(one: Job) -> tuple[Any, ...]:
        layout, schedule, training = one.layout, one.schedule, one.training
        assert training is not None
        degrees = layout.tp, layout.pp, layout.cp, layout.ep, schedule.virtual_stages
        numbers = map(math.log2, (*degrees, training.microbatch_size**0.25, 2**training.zero))
        return *numbers, training.recompute, schedule.kind

    def distance(other: Job) -> float:
        pairs = zip(own, place(other), strict=True)
        return sum(a != b if isinstance(a, str) else abs(a - b) for a, b in pairs)

    own = place(job)
    return distance


def changes_to(job: Job, other: Job) -> dict[str, Any]:
    """The keys of a job in which another layout of its model differs, with the values of that."""
    changes: dict[str, Any] = {}
    for table in ("layout", "schedule", "training"):
        before, after = (msgspec.structs.asdict(getattr(one, table)) for one in (job, other))
        different = (name for name in after if after[name] not in (None, before[name]))
        changes |= {f"{table}.{name}": after[name] for name in different}
    # What cannot be unset is given.
    if job.layout.etp not in (None, other.layout.tp):
        changes["layout.etp"] = other.layout.tp
    if job.schedule.layers_per_stage != other.schedule.layers_per_stage is None:
        for end in ("embedding", "head"):
            changes.pop(f"schedule.{end}_counts_as_layer", None)
        layers = layers_of_stages(parts_of(other).model, other.layout, other.schedule)
        changes["schedule.layers_per_stage"] = tuple(layers)
    return changes
