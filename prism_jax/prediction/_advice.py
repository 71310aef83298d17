"""What is worth a line about a job: that it does not fit its devices, and which changes would make
it fit; keys without an effect; and keys that make a step much longer.
"""

import contextlib
import itertools as it
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from .._summary import GIB
from ..data import Job, Training, load_software, toml_value
from ..lowering import lower_chains, parts_of
from ..schedule import order_of
from ..workload import Workload, has_experts
from ._memory import Memory, memory
from ._predict import predict, with_values


Change = dict[str, str | int | bool | tuple[str, ...]]

# The most changes that a message names.
_MOST_CHANGES = 3
# A rank holds no less with all microbatches than with so many for each pipeline rank.
_FEW = 4
# To read an order of more turns, of one microbatch in one stage, takes a second or more.
_MOST_TURNS = 200_000
# Keys that say what a job is, rather than how it runs.
_NO_SWITCHES = ("software",)
# What is worth a line: a step longer by this share.
_MUCH = 0.05


def check_memory(job: Job) -> None:
    """Raises a `ValueError` of one sentence if a job needs more memory than a device has. The
    message says where, by how much, and which small changes make it fit. A job without a model
    passes.
    """
    if job.model is None or job.cluster is None or job.training is None:
        return
    needed, least = _needed(job)
    if needed.fits:
        return
    fullest, device = needed.fullest, job.cluster.device
    usable = needed.usable_bytes / GIB
    found = [
        " ".join(
            f'--set "{k}={_toml(v)}"' if isinstance(v, tuple) else f"--set {k}={_toml(v)}"
            for k, v in change.items()
        )
        for change in fixes(job)
    ]
    fixed = f"use {' or '.join(f'`{one}`' for one in found)}" if found else "use more GPUs"
    raise ValueError(
        f"Job `{job.name}` needs {least}{fullest.bytes / GIB:.1f} GiB on pipeline rank "
        f"{fullest.rank}, and of a `{device.name}` {usable:.1f} GiB are usable; {fixed}, or go on "
        "with `--allow-oom`."
    )


def _needed(job: Job) -> tuple[Memory, str]:
    """The memory of a job. If it has very many ops and fewer of them need too much memory, theirs,
    with the words `at least`.
    """
    if _turns(job) > _MOST_TURNS:
        with contextlib.suppress(ValueError):  # An order may need as many microbatches.
            if not (least := memory(_with_few(job))).fits:
                return least, "at least "
    return memory(job), ""


def fixes(job: Job) -> list[Change]:
    """At most three small changes with which a job fits: single changes, or else pairs."""
    single = [*_changes(job)]
    pairs = (
        a | b
        for a, b in it.combinations(single, 2)
        if not {*a} & {*b} and not ("layout.dp" in a and "layout.dp" in b)
    )

    def some(changes: Iterable[Change]) -> list[Change]:
        return list(it.islice((one for one in changes if _fits(job, one)), _MOST_CHANGES))

    return some(single) or some(pairs)


def _changes(job: Job) -> Iterator[Change]:
    """Possible changes, the cheapest first. All keep the GPUs and the tokens of a step."""
    parts = parts_of(job)
    model, layout, schedule, training = parts.model, parts.layout, parts.schedule, parts.training
    if training.zero == 0 and layout.dp * layout.cp > 1:
        yield {"training.zero": 1}
    if training.zero <= 1 and layout.dp * layout.cp > 1 and training.overlap_grad_reduce:
        yield {"training.zero": 2, "training.accumulate_gradients": True}
    if training.attention == "unfused":
        yield {"training.attention": "flash"}
        if training.recompute == "none":
            yield {"training.recompute": "selective"}
    if training.recompute == "none":
        # What is cheap to recompute, as with Megatron-LM's `--recompute-modules`.
        modules = ("core_attn", "layernorm", "moe_act" if has_experts(model) else "mlp")
        for some in (modules[:2], modules):
            yield {"training.recompute": "selective", "training.recompute_modules": some}
    if not training.sequence_parallel and layout.tp > 1:
        yield {"training.sequence_parallel": True}
    if training.microbatch_size % 2 == 0:
        half = training.microbatch_size // 2
        twice = 2 * schedule.num_microbatches
        yield {"training.microbatch_size": half, "schedule.num_microbatches": twice}
    if training.recompute != "full":
        yield {"training.recompute": "full"}
    for degree, factor in it.product(("tp", "pp", "cp"), (2, 4, 8)):
        if layout.dp % factor == 0:
            yield {
                f"layout.{degree}": factor * getattr(layout, degree),
                "layout.dp": layout.dp // factor,
                "schedule.num_microbatches": factor * schedule.num_microbatches,
            }


def _fits(job: Job, change: Change) -> bool:
    job = with_values(job, change)
    if _turns(job) > _MOST_TURNS:
        return False
    with contextlib.suppress(ValueError):  # At once, where there are very many.
        if not memory(_with_few(job)).fits:
            return False
    try:
        return memory(job).fits
    except ValueError:  # The layout does not fit the model.
        return False


def _turns(job: Job) -> int:
    """How often a microbatch runs through a stage in a step."""
    schedule = job.schedule
    return job.layout.pp * schedule.virtual_stages * schedule.num_microbatches


def _with_few(job: Job) -> Job:
    """The job with fewer microbatches, which needs no more memory; whole groups of them, as
    interleaved schedules need.
    """
    pp, number = job.layout.pp, job.schedule.num_microbatches
    most = _MOST_TURNS // (pp * job.schedule.virtual_stages)
    few = min(_FEW * pp, most // pp * pp or max(most, 1))
    return with_values(job, {"schedule.num_microbatches": few}) if few < number else job


def _toml(value: str | int | bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(repr, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
