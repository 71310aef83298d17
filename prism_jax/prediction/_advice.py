"""What is worth a line about a job: keys without an effect, and keys that make a step longer."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from ..data import Job, Training, load_software, toml_value
from ..lowering import lower_chains, parts_of
from ..schedule import order_of
from ..workload import Workload
from ._memory import memory
from ._predict import predict, with_values


# Keys that say what a job is, rather than how it runs.
_NO_SWITCHES = ("software", "global_batch_size")
# What is worth a line: a step longer by this share.
_MUCH = 0.05


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
    training, layout = parts_of(job).training, job.layout
    stack = load_software(training.software).training if training.software else {}
    for field in msgspec.structs.fields(Training):
        key, value, default = f"training.{field.name}", getattr(training, field.name), field.default
        if field.name in _NO_SWITCHES or field.required or not value or value == default:
            continue
        if msgspec.to_builtins(value) == stack.get(field.name):
            continue
        choices = get_args(field.type) if get_origin(field.type) is Literal else (default,)
        others = {one: with_values(job, {key: one}) for one in choices if one != value}
        yield key, value, others
    if layout.etp not in (None, layout.tp):
        yield "layout.etp", layout.etp, {None: with_values(job, {"layout.etp": None})}


def _same(job: Job, before: Workload, changed: Job) -> bool:
    try:
        return _lowered(changed) == before and memory(changed) == memory(job)
    except ValueError:  # A key has an effect if the job is invalid without it.
        return False


def _lowered(job: Job) -> Workload:
    parts = parts_of(job)
    return lower_chains(parts, order_of(job.schedule, job.layout, parts.training))


def costly_keys(job: Job) -> tuple[str, ...]:
    """A sentence for each key of a job that makes its step much longer, with what to set instead.

    With sharded gradients beside a pipeline, each microbatch reduces all gradients of a stage,
    unless they are summed first, as in Megatron-LM.
    """
    how = job.training
    if job.model is None or how is None or how.zero < 2 or how.accumulate_gradients:
        return ()
    if job.layout.pp == 1 or job.layout.dp * job.layout.cp == 1:
        return ()
    for key, value in (("training.accumulate_gradients", True), ("training.zero", 1)):
        try:
            longer = predict(job).mean / predict(with_values(job, {key: value})).mean - 1
        except ValueError:  # Its gradients cannot be summed.
            continue
        if longer < _MUCH:
            return ()
        return (
            f"with `training.zero = {how.zero}` beside a pipeline, each microbatch reduces its "
            f"gradients, which makes the step {100 * longer:.0f} % longer than "
            f"`{key} = {toml_value(value)}` would.",
        )
    return ()
