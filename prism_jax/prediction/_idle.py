"""Finds keys that a job sets but that have no effect on it."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from ..data import Job, Training, load_software, toml_value
from ..program import lower_chains, parts_of
from ..schedule import order_of
from ..workload import Workload
from ._memory import memory


# Keys that say what a job is, rather than how it runs.
_NO_SWITCHES = ("software",)


def idle_keys(job: Job) -> tuple[str, ...]:
    """A sentence for each key of `training` and `layout` that has no effect on a job.

    A key has no effect if all kernels of the step and the memory are the same with its default
    value, or with each other of a few choices. So no key that matters is named, and no list of
    dependencies between keys is needed. Keys that are off, have their default value or come from
    the software stack are not considered.

    **Arguments:**

    - `job`: from `load_job`. A job without a model, or whose layout does not fit, has no such keys.
    """
    if job.model is None or job.training is None:
        return ()
    try:
        before = _lowered(job)
    except ValueError:
        return ()
    return tuple(
        f"`{key}` = {toml_value(value)} has no effect on this job, whose step and memory are the "
        f"same {_with(others)}; leave it out, or change what it depends on (docs/job_reference.md "
        "has each key)."
        for key, value, others in _without(job)
        if all(_same(job, before, changed) for changed in others.values())
    )


def _with(others: Mapping[Any, Job]) -> str:
    values = [toml_value(value) for value in others if value is not None]
    return f"with {' or '.join(values)}" if values else "without it"


def _without(job: Job) -> Iterator[tuple[str, Any, dict[Any, Job]]]:
    """Keys, their values, and the job with other values: the default or, for a few choices, each of
    the others.
    """
    training, layout = job.training, job.layout
    assert training is not None
    try:
        stack = load_software(training.software).training if training.software else {}
    except ValueError:  # The stack may be a file beside the job's file, whose path is unknown here.
        return
    for field in msgspec.structs.fields(Training):
        value, default = getattr(training, field.name), field.default
        given = msgspec.to_builtins(value) != stack.get(field.name)
        if field.name in _NO_SWITCHES or field.required or not value or value == default:
            continue
        if given:
            choices = get_args(field.type) if get_origin(field.type) is Literal else (default,)
            yield (
                f"training.{field.name}",
                value,
                {
                    other: msgspec.structs.replace(
                        job, training=msgspec.structs.replace(training, **{field.name: other})
                    )
                    for other in choices
                    if other != value
                },
            )
    if layout.etp not in (None, layout.tp):
        one = msgspec.structs.replace(job, layout=msgspec.structs.replace(layout, etp=None))
        yield "layout.etp", layout.etp, {None: one}


def _same(job: Job, before: Workload, changed: Job) -> bool:
    try:
        return _lowered(changed) == before and memory(changed) == memory(job)
    except ValueError:  # A key has an effect if the job is invalid without it.
        return False


def _lowered(job: Job) -> Workload:
    model, cluster, training, kernels = parts_of(job)
    order = order_of(job.schedule, job.layout, training)
    return lower_chains(model, job.layout, job.schedule, training, cluster, kernels, order)
