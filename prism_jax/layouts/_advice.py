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
from ..prediction import (
    MOST_TURNS,
    fits,
    least_bytes,
    memory,
    num_turns,
    predict,
    shortage,
    usable_bytes,
    with_values,
)
from ..workload import layers_of_stages
from ._rank import rank_layouts
from ._space import LayoutSpace, Question, layouts_of


# For how long a layout is searched, and which share of what is usable it leaves free.
_SECONDS, _MARGIN = 1.8, 0.05
# The layouts nearest to the job's are searched first, because a search of all may take longer.
_NEAREST = 64


def check_memory(job: Job) -> None:
    """Raises a `ValueError` of one sentence if a job needs more memory than is usable of its
    devices. The message says where, and which layout fits on the same GPUs. A job without a model
    passes.
    """
    if not (lacking := shortage(job)):
        return
    use = "use more GPUs"
    if changes := changes_to_fit(job):
        sets = " ".join(_as_set(key, value) for key, value in changes.items())
        changed = with_values(job, changes)
        needed, seconds = memory(changed).fullest.bytes / GIB, predict(changed).mean
        use = f"use `{sets}` ({needed:.1f} GiB, {seconds:.4g} s a step)"
    raise ValueError(f"{lacking}; {use}, or go on with `--allow-oom`.")


def _as_set(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else toml_value(value).replace(" ", "")
    return f'--set "{key}={text}"' if "[" in text else f"--set {key}={text}"


def changes_to_fit(job: Job, seconds: float = _SECONDS) -> dict[str, Any]:
    """The keys, with their values, that make a job the one with the shortest predicted step that
    fits on the same GPUs, of those that a search knows after some seconds; empty if it knows none.
    """
    began = time.monotonic()
    ends, until = began + seconds, began + seconds / 3
    parts = parts_of(job)
    layout, gpus = job.layout, job.layout.world_size
    space = LayoutSpace(
        tp=_by_nearness(layout.tp, min(parts.cluster.links[0].group, gpus)),
        pp=_by_nearness(layout.pp, min(parts.model.num_layers, gpus)),
        schedule=(*dict.fromkeys((job.schedule.kind, "1f1b", "interleaved-1f1b")),),
        recompute=(*dict.fromkeys((parts.training.recompute, "none", "selective", "full")),),
    )
    given = (parts.model, parts.cluster, parts.kernels, parts.training, job.batch_size, space)
    all_near = layouts_of(Question(*given), gpus)
    listed = [*it.takewhile(lambda _: time.monotonic() < until, all_near)]
    small = _small(sorted(listed, key=_distance_from(job)), ends)
    known, size = [], _NEAREST
    while near := [*it.islice(small, size)]:
        options = {"num_samples": None, "top": 1, "memory_margin": _MARGIN}
        with contextlib.suppress(ValueError):  # None fits, or none is known in time.
            found = rank_layouts(near, Mean(), budget=ends - time.monotonic(), **options)
            if found.ended == "interrupted":
                raise KeyboardInterrupt
            known.append(found.layouts[0])
        size *= 4
    if not known:
        return {}
    changes = _changes(job, min(known, key=lambda one: one.prediction.mean).job)
    with contextlib.suppress(ValueError):  # A key of the job that this layout does not allow.
        if fits(with_values(job, changes)):
            return changes
    return {}


def _by_nearness(own: int, most: int) -> tuple[int, ...]:
    return tuple(sorted(range(1, most + 1), key=lambda degree: abs(math.log(degree / own))))


def _small(jobs: Iterable[Job], ends: float) -> Iterator[Job]:
    """Jobs, until a time, whose devices hold their parameters, gradients and optimizer states,
    which those share that only keep other activations.
    """
    known: dict[tuple[Any, ...], bool] = {}
    for job in jobs:
        if time.monotonic() >= ends:
            return
        schedule = msgspec.structs.replace(job.schedule, num_microbatches=1)
        key = job.layout, schedule, job.training and job.training.zero
        if key not in known:
            known[key] = False
            with contextlib.suppress(ValueError):
                known[key] = least_bytes(job) <= usable_bytes(job)
        if known[key] and num_turns(job) <= MOST_TURNS / 4:
            yield job


def _distance_from(job: Job) -> Callable[[Job], float]:
    """How much changes from one job to another: a factor of two counts as much as another kind."""

    def place(one: Job) -> tuple[list[float], tuple[Any, ...]]:
        layout, schedule, training = one.layout, one.schedule, one.training
        assert training is not None
        degrees = (layout.tp, layout.pp, layout.cp, layout.ep, schedule.virtual_stages)
        numbers = [*map(math.log2, (*degrees, training.microbatch_size)), training.zero]
        return numbers, (training.recompute, schedule.kind)

    numbers, kinds = place(job)

    def distance(one: Job) -> float:
        others, of_other = place(one)
        away = sum(abs(a - b) for a, b in zip(numbers, others, strict=True))
        return away + sum(a != b for a, b in zip(kinds, of_other, strict=True))

    return distance


def _changes(job: Job, other: Job) -> dict[str, Any]:
    """The keys in which another layout differs, with its values."""
    assert job.model is not None
    changes: dict[str, Any] = {}
    for table in ("layout", "schedule", "training"):
        before, after = getattr(job, table), getattr(other, table)
        for name in after.__struct_fields__:
            value = getattr(after, name)
            if value is not None and value != getattr(before, name):
                changes[f"{table}.{name}"] = value
    # What cannot be unset is given.
    if job.layout.etp not in (None, other.layout.tp):
        changes["layout.etp"] = other.layout.tp
    if job.schedule.layers_per_stage is not None:
        for end in ("embedding", "head"):
            changes.pop(f"schedule.{end}_counts_as_layer", None)
        layers = layers_of_stages(job.model, other.layout, other.schedule)
        changes["schedule.layers_per_stage"] = tuple(layers)
    return changes
