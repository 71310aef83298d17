"""What is worth a line about a job: keys without an effect, and keys that make a step longer."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from ..data import Job, Training, list_names, load_software, toml_value
from ..lowering import job_parts, lower_chains
from ..schedule import order_of
from ..workload import Workload
from ._expected_error import class_of
from ._memory import fits, memory
from ._predict import mean_step, with_values


# Keys that say what a job is, rather than how it runs.
_NO_SWITCHES = ("software", "global_batch_size", "dtype")  # A device may have one dtype alone.
# What is worth a line: a step longer by this share.
_MUCH = 0.05
# Keys of a software stack that have an effect together.
_TOGETHER = {
    "launches by the host": ("launch_floor_s", "host_module_s", "host_experts_s"),
    "unfused kernels": ("eager_share", "separate_products", "rotary_bytes"),
    "FSDP's copies": ("gather_copy_bytes", "gradient_copy_bytes"),
}


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
        f"same {_with(alternatives)}; leave it out, or change what it depends on "
        "(docs/job_reference.md has each key)."
        for key, value, alternatives in _without(job)
        if all(_same(job, before, changed) for changed in alternatives.values())
    )


def _with(values: Mapping[Any, Job]) -> str:
    texts = [toml_value(value) for value in values if value is not None]
    return f"with {' or '.join(texts)}" if texts else "without it"


def _without(job: Job) -> Iterator[tuple[str, Any, dict[Any, Job]]]:
    """Keys, their values, and the job with other values: the default or, for a few choices, each of
    the others.
    """
    training, layout = job_parts(job).training, job.layout
    stack = load_software(training.software).training if training.software else {}
    for field in msgspec.structs.fields(Training):
        key, value, default = f"training.{field.name}", getattr(training, field.name), field.default
        if field.name in _NO_SWITCHES or field.required or not value or value == default:
            continue
        if msgspec.to_builtins(value) == stack.get(field.name):
            continue
        choices = get_args(field.type) if get_origin(field.type) is Literal else (default,)
        alternatives = {
            choice: with_values(job, {key: choice}) for choice in choices if choice != value
        }
        yield key, value, alternatives
    if layout.etp not in (None, layout.tp):
        yield "layout.etp", layout.etp, {None: with_values(job, {"layout.etp": None})}


def _same(job: Job, before: Workload, changed: Job) -> bool:
    try:
        return _lowered(changed) == before and memory(changed) == memory(job)
    except ValueError:  # A key has an effect if the job is invalid without it.
        return False


def _lowered(job: Job) -> Workload:
    parts = job_parts(job)
    return lower_chains(parts, order_of(job.schedule, job.layout, parts.training))


def costly_keys(job: Job) -> tuple[str, ...]:
    """A sentence for each key of a job that makes its step much longer, with what to set instead.

    With sharded gradients beside a pipeline, each microbatch reduces all gradients of a stage,
    unless they are summed first, as in Megatron-LM.
    """
    training = job.training
    if job.model is None or training is None or training.zero < 2 or training.accumulate_gradients:
        return ()
    if job.layout.pp == 1 or job.layout.dp * job.layout.cp == 1:
        return ()
    for key, value in (("training.accumulate_gradients", True), ("training.zero", 1)):
        try:
            longer = mean_step(job) / mean_step(with_values(job, {key: value})) - 1
        except ValueError:  # Its gradients cannot be summed.
            continue
        if longer < _MUCH:
            return ()
        return (
            f"with `training.zero = {training.zero}` beside a pipeline, each microbatch reduces "
            f"its gradients, which makes the step {100 * longer:.0f} % longer than "
            f"`{key} = {toml_value(value)}` would.",
        )
    return ()


class Effect(msgspec.Struct, frozen=True):
    """What a job's software stack does to its step.

    **Attributes:**

    - `text`: a sentence.
    - `keys`: the keys that the stack sets.
    - `longer`: by which share the step is longer than with their plain values.
    """

    text: str
    keys: tuple[str, ...]
    longer: float


def effects_of_stack(job: Job, mean: float) -> tuple[Effect, ...]:
    """What of a job's software stack makes its step of `mean` seconds more than 5 % longer or
    shorter: a key that the stack sets, in place of its plain value, or keys that act together. What
    a job needs to fit is left out.
    """
    training = job.training
    if training is None or not training.software:
        return ()
    plain, effects = _plain(training), []
    together = {key: effect for effect, keys in _TOGETHER.items() for key in keys}
    causes: dict[str, dict[str, Any]] = {}
    for key in load_software(training.software).training:
        if f"training.{key}" not in job.given.keys and getattr(training, key) != plain[key]:
            beside = toml_value(plain[key]) or "none"
            alone = f"`{key} = {toml_value(getattr(training, key))}`, not {beside}"
            causes.setdefault(together.get(key, alone), {})[f"training.{key}"] = plain[key]
    for cause, values in causes.items():
        with contextlib.suppress(ValueError):  # A job may not do without.
            plain_job = with_values(job, values)
            longer = mean / mean_step(plain_job) - 1
            if abs(longer) > _MUCH and fits(plain_job):
                text = f"{training.software} {_change(longer)} by {cause}"
                effects.append(Effect(text, tuple(values), longer))
    return tuple(effects)


def _plain(training: Training) -> dict[str, Any]:
    """The defaults of keys, and gradients in the dtype of the model."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(Training)}
    return defaults | {"gradient_dtype": training.base_dtype}


def _change(longer: float) -> str:
    percent = f"{100 * abs(longer):.{int(abs(longer) < 0.01)}f}"
    if float(percent) == 0:
        return "does not change the step"
    return f"makes the step {percent} % {'longer' if longer > 0 else 'shorter'}"


def uncounted(job: Job, mean: float | None = None) -> str:
    """What is not counted in the step of a job without a software stack, `mean` seconds where it is
    known, and which stack is the nearest, as a sentence; empty if there is nothing.
    """
    training = job.training
    if job.model is None or training is None or training.software or job.calibrated:
        return ""
    plain, longer_by = _plain(training), ""
    left_out = [
        effect
        for effect, keys in _TOGETHER.items()
        if all(getattr(training, key) == plain[key] for key in keys)
        if training.zero == 3 or "FSDP" not in effect
    ]
    if not left_out:
        return ""
    stack = nearest_stack(job)
    with contextlib.suppress(ValueError):  # The job may give what the stack cannot do.
        mean = mean_step(job) if mean is None else mean
        longer = mean_step(job.replace(**{"training.software": stack})) / mean - 1
        longer_by = f", {_change(longer)}"
    return (
        f"no software stack: {', '.join(left_out)} are not counted; the nearest, "
        f"`training.software={stack}`{longer_by}."
    )


def nearest_stack(job: Job) -> str:
    """The shipped software stack that is the nearest to a job with a model and a cluster."""
    kind = " ".join(class_of(job)[:3])
    stacks = map(load_software, list_names("software stack"))
    return next(stack.name for stack in stacks if kind in stack.nearest_to)
