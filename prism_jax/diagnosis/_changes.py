"""What could be set otherwise, and by how much steps would be shorter."""

import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np

from ..analysis import Scenario
from ..data import Job, apply_kernel_override, parse_override
from ..prediction import memory, predict
from ..program import compile_job
from ._causes import Simulated


_FLAG, _ORDER, _MACHINE = "a flag", "the order of work", "the machine"
# What is tried. A value that the job has already is left out.
_FLAGS = {
    **{f"overlap_{name}": (True,) for name in ("grad_reduce", "param_gather", "tp_backward")},
    "tp_overlap": (True,),
    "sequence_parallel": (True,),
    "accumulate_gradients": (True,),
    "overlap_shared_experts": (True,),
    "fused_experts": (True,),
    "zero": (1,),
    "recompute": ("none", "selective"),
    "gradient_dtype": ("bf16",),
    "attention": ("flash", "cudnn"),
    "token_dispatcher": ("deepep", "hybridep"),
    "cuda_graphs": ("modules",),
}
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


def cheapest_changes(usual: Simulated, most: int = 5) -> tuple[Change, ...]:
    """The changes that shorten a step most, the cheapest first: flags, then the order of work, then
    the machine. Each fits in memory, and is simulated with common random numbers.
    """
    job = usual.job
    now, best = predict(job).mean, dict[tuple[str, ...], tuple[float, str, tuple[str, ...], Job]]()
    for cost, texts in _tried(job):
        try:
            other = job
            for text in texts:
                other = _set(other, text)
            gain = 1 - predict(other).mean / now
            fits = memory(other).fits or not memory(job).fits
        except ValueError:  # It does not go with this job.
            continue
        keys = tuple(text.split("=")[0] for text in texts)
        if fits and (cost == _MACHINE or gain > max(_LEAST, best.get(keys, (0.0,))[0])):
            best[keys] = (gain, cost, texts, other)
    costs = (_FLAG, _ORDER, _MACHINE)
    chosen = sorted(best.values(), key=lambda one: -one[0])[:most]
    found = []
    for _, cost, texts, other in chosen:
        steps = usual.of(Scenario(compile_job(other)))
        before, after = (np.quantile(x, (0.5, 0.95)) for x in (usual.steps, steps))
        if max((before - after) / before) > _LEAST:
            found.append(Change(texts, cost, *(before - after).tolist()))
    return tuple(sorted(found, key=lambda one: (costs.index(one.cost), -one.p95)))


def _tried(job: Job) -> Iterator[tuple[str, tuple[str, ...]]]:
    training, order = job.training, job.schedule
    assert training is not None
    for name, values in _FLAGS.items():
        for value in values:
            if value != getattr(training, name):
                yield _FLAG, (f"training.{name}={str(value).lower()}",)
    virtual = order.virtual_stages
    for number in (virtual * 2, virtual // 2) if virtual > 1 else ():
        yield _ORDER, (f"schedule.virtual_stages={number}",)
    if order.kind == "1f1b" and job.layout.pp > 1:
        yield _ORDER, ("schedule.kind=interleaved-1f1b", "schedule.virtual_stages=2")
        yield _ORDER, ("schedule.kind=zb-h1",)
    size, number = training.microbatch_size, order.num_microbatches
    for twice, half in ((size * 2, number / 2), (size / 2, number * 2)):
        if twice == int(twice) and half == int(half):
            keys = "training.microbatch_size", "schedule.num_microbatches"
            yield _ORDER, (f"{keys[0]}={int(twice)}", f"{keys[1]}={int(half)}")
    yield _MACHINE, ("kernels.rank.sigma=0",)
    yield _MACHINE, ("kernels.network.slowdown=1",)


def _set(job: Job, text: str) -> Job:
    """The job with another value of a key, or a `ValueError`."""
    override = parse_override(text)
    part, name = override.keys[0], override.keys[-1]
    if part == "kernels":
        if job.kernels is None:
            raise ValueError(f"{job.name} has no tables of kernels.")
        return msgspec.structs.replace(job, kernels=apply_kernel_override(job.kernels, override))
    changed = msgspec.structs.replace(getattr(job, part), **{name: override.value})
    return msgspec.structs.replace(job, **{part: changed})
