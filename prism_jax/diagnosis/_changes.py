"""What could be set otherwise, and by how much steps would be shorter."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from ..analysis import Scenario
from ..data import Job, apply_kernel_override, parse_override
from ..lowering import parts_of
from ..prediction import memory, predict
from ..program import compile_job
from ._causes import Simulated


_FLAG, _ORDER, _PRECISION, _MACHINE = "a flag", "the order of work", "the precision", "the machine"
# What is tried of `training`, where it differs from what the job has.
_FLAGS = (
    "overlap_grad_reduce=true overlap_param_gather=true overlap_tp_backward=true tp_overlap=true "
    "sequence_parallel=true accumulate_gradients=true overlap_shared_experts=true zero=1 "
    "fused_experts=true recompute=none recompute=selective attention=flash "
    "attention=cudnn token_dispatcher=deepep token_dispatcher=hybridep cuda_graphs=modules"
)
_LEAST = 0.002  # The share of a step that is worth a line.


@dataclasses.dataclass(frozen=True)
class Change:
    """**Attributes:**

    - `set`: the keys of the job to set, as of `--set`.
    - `cost`: what has to be changed.
    - `p50`, `p95`: by how much these fall, in seconds.
    """

    set: tuple[str, ...]
    cost: str
    p50: float
    p95: float


class _Predicted(NamedTuple):
    """The share by which a step without variability is shorter, and what to set for it."""

    gain: float
    cost: str
    set: tuple[str, ...]
    job: Job


def cheapest_changes(usual: Simulated, most: int = 5) -> tuple[Change, ...]:
    """The changes that shorten a step most, the cheapest first: flags, then the order of work, then
    the precision, then the machine. Each fits in memory, and is simulated with common random
    numbers.
    """
    costs = (_FLAG, _ORDER, _PRECISION, _MACHINE)
    found = []
    for _, cost, texts, other in _predicted(usual.job)[:most]:
        steps = usual.of(Scenario(compile_job(other)))
        before, after = (np.quantile(x, (0.5, 0.95)) for x in (usual.steps, steps))
        if max((before - after) / before) > _LEAST:
            found.append(Change(texts, cost, *(before - after).tolist()))
    return tuple(sorted(found, key=lambda one: (costs.index(one.cost), -one.p95)))


def quickest_change(job: Job) -> tuple[tuple[str, ...], float] | None:
    """The setting that shortens a step without variability most, of those that cost nothing: they
    keep the GPUs, the layout, the tokens and the precision, and fit in memory. And by which share
    of the step; `None` if no setting is worth a line.
    """
    for one in _predicted(job):
        if one.cost in (_FLAG, _ORDER) and one.gain > _LEAST:
            return one.set, one.gain
    return None


def _predicted(job: Job) -> list[_Predicted]:
    """Of each key the best value, the largest gain first."""
    now, fit = predict(job).mean, memory(job).fits
    best: dict[tuple[str, ...], _Predicted] = {}
    for cost, texts in _tried(job):
        try:
            other = job
            for text in texts:
                other = _set(other, text)
            gain = 1 - predict(other).mean / now
            fits = memory(other).fits or not fit
        except ValueError:  # It does not go with this job.
            continue
        keys = tuple(text.split("=")[0] for text in texts)
        most_yet = max(_LEAST, best[keys].gain if keys in best else 0.0)
        if fits and (cost == _MACHINE or gain > most_yet):
            best[keys] = _Predicted(gain, cost, texts, other)
    return sorted(best.values(), key=lambda one: -one.gain)


def _tried(job: Job) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from ((_FLAG, (f"training.{text}",)) for text in _FLAGS.split())
    yield _PRECISION, ("training.gradient_dtype=bf16",)
    virtual, number = job.schedule.virtual_stages, job.schedule.num_microbatches
    size = parts_of(job).training.microbatch_size
    for other in (virtual * 2, virtual // 2) if virtual > 1 else ():
        yield _ORDER, (f"schedule.virtual_stages={other}",)
    if job.schedule.kind == "1f1b":
        yield _ORDER, ("schedule.kind=interleaved-1f1b", "schedule.virtual_stages=2")
        yield _ORDER, ("schedule.kind=zb-h1",)
    for twice, half in ((size * 2, number / 2), (size / 2, number * 2)):
        if min(twice, half) >= 1 and twice % 1 == half % 1 == 0:
            keys = "training.microbatch_size", "schedule.num_microbatches"
            yield _ORDER, (f"{keys[0]}={twice:.0f}", f"{keys[1]}={half:.0f}")
    yield from ((_MACHINE, (f"kernels.{law}",)) for law in ("rank.sigma=0", "network.slowdown=1"))


def _set(job: Job, text: str) -> Job:
    """The job with another value of a key, or a `ValueError`."""
    override = parse_override(text)
    part, name = override.keys[0], override.keys[-1]
    if part == "kernels":
        kernels = apply_kernel_override(parts_of(job).kernels, override)
        return msgspec.structs.replace(job, kernels=kernels)
    changed = msgspec.structs.replace(getattr(job, part), **{name: override.value})
    return msgspec.structs.replace(job, **{part: changed})
