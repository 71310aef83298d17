"""The best layout for a job that does not fit, on the same GPUs."""

import contextlib
import functools as ft
import itertools as it
import math
import time
from typing import Any

import msgspec

from .._summary import GIB
from ..data import DERIVED, Job, toml_value
from ..lowering import job_parts
from ..prediction import ModelPasses, fits, least_seconds, memory, predict, shortage, with_values
from ..workload import layers_of_stages
from ._space import LayoutSpace, Question, layout_variants, layouts_of


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
        changes = changes_to(job, best)
        changed = with_values(job, changes)
        # Of the same GPUs and batch, what followed before follows again.
        set_keys = {*job.given.keys, *["layout.dp"] * (job.world_size is None)}
        listed = (key for key in changes if key in set_keys or key not in DERIVED)
        sets = " ".join(_as_set(key, changes[key]) for key in listed)
        size, seconds = memory(changed).fullest.bytes / GIB, predict(changed).mean
        use = f"use `{sets}` ({size:.1f} GiB, {seconds:.4g} s a step)"
    raise ValueError(f"{lacking}; {use}, or go on with `--allow-oom`.")


def _as_set(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else toml_value(value).replace(" ", "")
    return f'--set "{key}={text}"' if "[" in text else f"--set {key}={text}"


def best_on_same_gpus(job: Job, seconds: float = _SECONDS) -> Job | None:
    """The layout with the shortest predicted step that fits on the GPUs of a job, of those that a
    search looks at within some seconds, the nearest first; `None` if none of them fits.
    """
    began = time.monotonic()
    listed_until, ends = (began + seconds * share for share in (0.3, 1))
    parts, layout, gpus = job_parts(job), job.layout, job.layout.world_size
    space = LayoutSpace(
        tp=_by_nearness(layout.tp, min(parts.cluster.links[0].group, gpus)),
        pp=_by_nearness(layout.pp, min(parts.model.num_layers, gpus)),
        schedule=(*dict.fromkeys((job.schedule.kind, "1f1b", "interleaved-1f1b")),),
        recompute=(*dict.fromkeys((parts.training.recompute, "none", "selective", "full")),),
    )
    machine = parts.cluster, parts.kernels
    question = Question(parts.model, *machine, parts.training, job.batch_size, space)
    # Its own stages may not divide the layers evenly.
    layouts = it.chain(layout_variants(question, layout, job.schedule), layouts_of(question, gpus))
    listed = it.takewhile(lambda _: time.monotonic() < listed_until, layouts)
    by_distance = sorted(listed, key=ft.partial(_distance, job))
    best, shortest, passes = None, math.inf, dict[tuple[Any, ...], ModelPasses]()
    for layout_job in it.takewhile(lambda _: time.monotonic() < ends, by_distance):
        schedule = layout_job.schedule
        turns = layout_job.layout.pp * schedule.virtual_stages * schedule.num_microbatches
        with contextlib.suppress(ValueError):
            if turns > _MOST_TURNS or not fits(layout_job, _MARGIN):
                continue
            if least_seconds(layout_job, passes, sharded=True) >= shortest:
                continue
            changed = with_values(job, changes_to(job, layout_job))
            if fits(changed) and (mean := predict(changed).mean) < shortest:
                best, shortest = layout_job, mean
    return best


def _by_nearness(degree_of_job: int, most: int) -> tuple[int, ...]:
    return tuple(
        sorted(range(1, most + 1), key=lambda degree: abs(math.log(degree / degree_of_job)))
    )


def _distance(job: Job, changed: Job) -> float:
    """How much changes: a factor of two of a degree counts as much as another kind, and as one of
    16 of the size of microbatches.
    """
    pairs = zip(_place(job), _place(changed), strict=True)
    return sum(a != b if isinstance(a, str) else abs(a - b) for a, b in pairs)


def _place(job: Job) -> tuple[Any, ...]:
    layout, schedule, training = job.layout, job.schedule, job.training
    assert training is not None
    degrees = layout.tp, layout.pp, layout.cp, layout.ep, schedule.virtual_stages
    numbers = map(math.log2, (*degrees, training.microbatch_size**0.25, 2**training.zero))
    return *numbers, training.recompute, schedule.kind


def changes_to(job: Job, changed: Job) -> dict[str, Any]:
    """The keys of a job in which another layout of its model differs, with the values of that."""
    changes: dict[str, Any] = {}
    for table in ("layout", "schedule", "training"):
        before, after = (
            msgspec.structs.asdict(getattr(of_job, table)) for of_job in (job, changed)
        )
        different = (name for name in after if after[name] not in (None, before[name]))
        changes |= {f"{table}.{name}": after[name] for name in different}
    # What cannot be unset is given.
    if changed.layout.etp is None and job.layout.etp not in (None, changed.layout.tp):
        changes["layout.etp"] = changed.layout.tp
    if job.schedule.layers_per_stage != changed.schedule.layers_per_stage is None:
        for end in ("embedding", "head"):
            changes.pop(f"schedule.{end}_counts_as_layer", None)
        layers = layers_of_stages(job_parts(changed).model, changed.layout, changed.schedule)
        changes["schedule.layers_per_stage"] = tuple(layers)
    return changes
