"""Checks whether a job fits into the memory of its devices, and which changes would make it fit."""

import contextlib
import itertools as it
from collections.abc import Iterator

import msgspec

from ..data import Job
from ..workload import has_experts
from ._memory import memory


Change = dict[str, str | int | bool | tuple[str, ...]]

# The most changes that a message names.
_MOST_CHANGES = 3
# A rank holds no less with all microbatches than with so many for each pipeline rank.
_FEW = 4


def check_memory(job: Job) -> None:
    """Raises a `ValueError` of one sentence if a job needs more memory than a device has. The
    message says where, by how much, and which small changes make it fit. A job without a model
    passes.
    """
    if job.model is None or job.cluster is None or job.training is None:
        return
    needed = memory(job)
    if needed.fits:
        return
    fullest, device = needed.fullest, job.cluster.device
    over = fullest.bytes - needed.device_bytes
    found = [
        " ".join(
            f'--set "{k}={_toml(v)}"' if isinstance(v, tuple) else f"--set {k}={_toml(v)}"
            for k, v in change.items()
        )
        for change in fixes(job)
    ]
    fixed = f"use {' or '.join(f'`{one}`' for one in found)}" if found else "use more GPUs"
    raise ValueError(
        f"Job `{job.name}` needs {fullest.bytes / 1e9:.1f} GB on pipeline rank {fullest.rank}, "
        f"{over / 1e9:.1f} GB more than a `{device.name}` has; {fixed}, or go on with "
        "`--allow-oom`."
    )


def fixes(job: Job) -> list[Change]:
    """At most three small changes with which a job fits: single changes, or else pairs."""
    single = [*_changes(job)]
    found = list(it.islice(filter(lambda change: _fits(job, change), single), _MOST_CHANGES))
    if found:
        return found
    pairs = (
        a | b
        for a, b in it.combinations(single, 2)
        if not {*a} & {*b} and not ("layout.dp" in a and "layout.dp" in b)
    )
    return list(it.islice(filter(lambda change: _fits(job, change), pairs), _MOST_CHANGES))


def _changes(job: Job) -> Iterator[Change]:
    """Possible changes, the cheapest first. All keep the GPUs and the tokens of a step."""
    layout, training, schedule = job.layout, job.training, job.schedule
    assert training is not None
    assert job.model is not None
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
        modules = ("core_attn", "layernorm", "moe_act" if has_experts(job.model) else "mlp")
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
    for degree in ("tp", "pp", "cp"):
        value = getattr(layout, degree)
        for factor in (2, 4, 8):
            if layout.dp % factor == 0:
                more = factor * schedule.num_microbatches
                change: Change = {f"layout.{degree}": factor * value}
                yield change | {
                    "layout.dp": layout.dp // factor,
                    "schedule.num_microbatches": more,
                }


def _fits(job: Job, change: Change) -> bool:
    for key, value in change.items():
        table, _, name = key.partition(".")
        part = msgspec.structs.replace(getattr(job, table), **{name: value})
        job = msgspec.structs.replace(job, **{table: part})
    schedule = job.schedule
    few = min(schedule.num_microbatches, _FEW * job.layout.pp)
    fewer = msgspec.structs.replace(schedule, num_microbatches=few)
    with contextlib.suppress(ValueError):  # At once, where there are very many.
        if not memory(msgspec.structs.replace(job, schedule=fewer)).fits:
            return False
    try:
        return memory(job).fits
    except ValueError:  # The layout does not fit the model.
        return False


def _toml(value: str | int | bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(repr, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
