"""The step of a job without variability, and its parts; on the host, and without JAX unless experts
have uneven loads.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float

from .._summary import Column, Shown, Table, picked_attributes
from ..data import Job, Kernels, check_parts
from ..lowering import (
    Frame,
    Sink,
    blocks_of_kinds,
    frame_of,
    graph_of,
    job_parts,
    lay_out,
    lower_chains,
    sinks_of,
    when_reduced,
)
from ..schedule import OVERLAPPED, SEND_RECV, group_ends, order_of, schedule_parts
from ..workload import Block, Workload, block_mean, block_means, model_flop, split_mean


# Groups of ranks by the degree of parallelism that they communicate for.
_DEGREES = {"etp": "tp", "edp": "dp", "all": "dp", "embedding": "pp"}
# Smaller parts of a step are rounding errors.
_LEAST = 1e-13


class Prediction(Shown, msgspec.Struct, frozen=True):
    """The step of a job without variability.

    **Attributes:**

    - `mean`: the step time, in seconds. Steps that vary take longer on average, because ops wait
        for the slowest.
    - `breakdown`: how a GPU of the average pipeline rank spends the step, in seconds that add up to
        `mean`: for each kind of kernel (`gemm`, `attention`, ...), its compute; for each degree of
        parallelism, `exposed ...`, its collectives and sends that are not overlapped with compute;
        and `bubble`, the time spent waiting for other stages.
    - `stages`: the seconds of compute and exposed collectives of each (global virtual) stage.
    - `phases`: the same for each phase of ops, on the average pipeline rank.
    - `exposed_send_recv`: how much shorter the step would be if sends between pipeline ranks took
        no time, in seconds; part of `exposed pp`.
    - `mfu`: model FLOP/s utilisation: the matrix products of one forward and one backward, without
        recomputation, as a share of what the devices could do at their peak (Chowdhery et al. 2022,
        arXiv:2204.02311, appendix B), each once: on whatever layout and by whatever kernels. Of
        attention, scores that a mask leaves out do not count. Layers that are frozen have no
        backward.
    - `flop_per_s`: the FLOP/s of these products on each device.
    - `tokens_per_s`: the tokens per second of the whole job; `nan` for a model without words.
    - `samples_per_s`: the sequences, or other samples, per second of the whole job.
    """

    mean: float
    breakdown: dict[str, float]
    stages: tuple[float, ...]
    phases: dict[str, float]
    exposed_send_recv: float
    mfu: float
    flop_per_s: float
    tokens_per_s: float
    samples_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Its fields; the mean is one of the step time, as that of a law."""
        mean, *names = self.__struct_fields__
        return {"step_time_s": picked_attributes(self, mean), **picked_attributes(self, *names)}

    def summary(self) -> Table:
        rates = {"tokens": self.tokens_per_s, "samples": self.samples_per_s}
        yields = {f"{rate:{rate_form(rate)}} {unit}/s": rate for unit, rate in rates.items()}
        yields |= {f"{self.flop_per_s / 1e12:,.1f} TFLOP/s per device": self.flop_per_s}
        yields |= {f"MFU {100 * self.mfu:.1f} %": self.mfu}
        texts = [text for text, value in yields.items() if value == value]
        title = f"A step of {self.mean:.5g} s without variability, by parts"
        return parts_table(self.breakdown, title, [", ".join(texts)])


def rate_form(least: float) -> str:
    """How rates of at least `least` per second are written."""
    return ",.0f" if least >= 100 else ".3g"


def parts_table(parts: Mapping[str, float], title: str = "", notes: Sequence[str] = ()) -> Table:
    """The seconds of the parts of a step, and their shares; the longest first."""
    total = sum(parts.values()) or math.nan
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    rows = [{"part": name, "seconds": seconds} for name, seconds in ordered]
    columns = (
        Column("part"),
        Column("time", "seconds", ".4g", "s"),
        Column("share", "seconds", ".1f", "%", scale=100 / total),
    )
    return Table(columns, rows, title, notes)


def predict(job: Job) -> Prediction:
    """Predicts the step of a job if every latency were its mean.

    The result is that of `simulate` for the job without variability, but takes some milliseconds.
    Loads of experts are those of the fullest rank, on average.

    **Arguments:**

    - `job`: from `load_job`, with a model and a cluster.

    **Returns:**

    A [`Prediction`][].

    **Raises:**

    `ValueError` if the job has no model, or if its layout does not fit the model.
    """
    parts = job_parts(job)
    training = parts.training
    try:
        order, graph, workload = lay_out(parts)
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None
    of = frame_of(graph)
    step = run(of, workload)
    without = np.where(of.is_send_recv, 0.0, step.latencies)
    sends = step.seconds - _ended(of, workload, without, step.sinks)[0]
    breakdown, phases = _of_average_rank(of, workload, step, sends)
    runs = schedule_parts(order)
    starts = np.isin(runs.stage[runs.phase == "F"], order.chain_starts)
    microbatches = job.layout.dp * int(starts.sum())
    flop_per_s = model_flop(parts) * microbatches / step.seconds / job.layout.world_size
    peak = parts.cluster.device.peak_flop_per_s.get(training.dtype, np.nan)
    samples_per_s = microbatches * training.microbatch_size / step.seconds
    has_words = job.unit == "token"
    return Prediction(
        mean=step.seconds,
        breakdown=breakdown,
        stages=_of_stages(of, step),
        phases=phases,
        exposed_send_recv=sends,
        mfu=flop_per_s / peak,
        flop_per_s=flop_per_s,
        tokens_per_s=samples_per_s * (training.sequence_length if has_words else np.nan),
        samples_per_s=samples_per_s,
    )


def kernels_of_ops(job: Job) -> dict[tuple[str, int], dict[str, float]]:
    """What ops are made of: for each phase and (global virtual) stage the mean seconds of each kind
    of kernel and of exposed collectives in one op, with the names of `Prediction.breakdown`.
    Overlapped pairs, whose two ops differ from pair to pair, are left out.

    **Raises:**

    `ValueError` as `predict`.
    """
    _, graph, workload = lay_out(job_parts(job))
    kinds = frame_of(graph).kinds
    kernels: dict[tuple[str, int], dict[str, float]] = {}
    for kind, block in zip(kinds, blocks_of_kinds(workload, kinds), strict=True):
        if kind.phase not in (SEND_RECV, OVERLAPPED):
            kernels.setdefault((kind.phase, kind.stage), dict(_named_parts(block)[1]))
    return kernels


def mean_step(job: Job) -> float:
    """`predict(job).mean` alone."""
    _, graph, workload = lay_out(job_parts(job))
    return run(frame_of(graph), workload).seconds


def constant_step(job: Job) -> Callable[[Kernels], float]:
    """A function from a job's kernels to the step time if every latency were its mean, in seconds.

    The graph is built once, so that a call takes some milliseconds for some thousand ops. It is
    below the mean of steps that vary, which wait for the slowest.

    **Arguments:**

    - `job`: a job with a model and a cluster. Its own kernels are not used.

    **Raises:**

    `ValueError` wherever `compile_job` raises it.
    """
    parts = job_parts(job)
    check_parts(parts.model, parts.layout, parts.schedule, parts.training, parts.cluster)
    order = order_of(parts.schedule, parts.layout, parts.training)
    of = frame_of(graph_of(parts, order))

    def seconds(kernels: Kernels) -> float:
        changed = msgspec.structs.replace(parts, kernels=kernels)
        return run(of, lower_chains(changed, order)).seconds

    return seconds


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """A job with other values of some keys, such as `training.zero`."""

    def changed(table: Any, names: list[str], value: Any) -> Any:
        if not names:
            return value
        inner = changed(getattr(table, names[0]), names[1:], value)
        return msgspec.structs.replace(table, **{names[0]: inner})

    for key, value in values.items():
        job = changed(job, key.split("."), value)
    return job


@dataclasses.dataclass(frozen=True)
class ConstantStep:
    """A step of constant latencies, in seconds.

    **Attributes:**

    - `seconds`: the step time.
    - `reduced`: the exposed part of the gradient reduction of each pipeline rank.
    - `latencies`: the latency of each op.
    - `blocks`: the block of each kind of op.
    - `sinks`: the reductions of gradients.
    """

    seconds: float
    reduced: Float[np.ndarray, "ranks"]
    latencies: Float[np.ndarray, "ops"]
    blocks: Sequence[Block]
    sinks: Sequence[Sink]


def run(of: Frame, workload: Workload) -> ConstantStep:
    """A step of a workload."""
    blocks, sinks = blocks_of_kinds(workload, of.kinds), sinks_of(of.graph, workload)
    latencies = np.array(block_means(blocks))[of.kind_of]
    return ConstantStep(*_ended(of, workload, latencies, sinks), latencies, blocks, sinks)


def _ended(
    of: Frame, workload: Workload, latencies: Float[np.ndarray, "ops"], sinks: Sequence[Sink]
) -> tuple[float, Float[np.ndarray, "ranks"]]:
    """The first two figures of a `ConstantStep`."""
    ends = group_ends(of.graph, latencies, [sink.ops for sink in sinks])
    reduced = when_reduced(sinks, ends, workload.contention)
    last = ends[np.flatnonzero(np.diff([sink.rank for sink in sinks], append=-1))]
    return float(np.max(reduced) + block_mean(workload.tail)), reduced - last


def _of_average_rank(
    of: Frame, workload: Workload, step: ConstantStep, sends: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The parts of a step and its phases, both of the average pipeline rank."""
    ranks = of.graph.num_ranks
    breakdown: defaultdict[str, float] = defaultdict(float)
    phases: defaultdict[str, float] = defaultdict(float)

    split: dict[int, tuple[float, list[tuple[str, float]]]] = {}

    def add(block: Block, times: float) -> float:
        if id(block) not in split:  # Most stages have the same block.
            split[id(block)] = _named_parts(block)
        whole, parts = split[id(block)]
        for name, seconds in parts:
            breakdown[name] += times * seconds
        return times * whole

    counts = np.bincount(of.kind_of).tolist()
    for kind, block, count in zip(of.kinds, step.blocks, counts, strict=True):
        if kind.phase != SEND_RECV:
            phases[kind.phase] += add(block, count / ranks)
    reduced = workload.reduce_scatter  # Kept, for their `id`s.
    for block, exposed in zip(reduced, step.reduced.tolist(), strict=True):
        mean_block = block_mean(block)
        if mean_block:
            add(block, exposed / mean_block / ranks)
    add(workload.tail, 1)
    waits = max(step.seconds - sum(breakdown.values()), 0.0)
    breakdown["exposed pp"] += min(sends, waits)
    breakdown["bubble"] = waits - min(sends, waits)
    least = _LEAST * step.seconds
    return {name: s for name, s in breakdown.items() if s > least}, dict(phases)


def _named_parts(block: Block) -> tuple[float, list[tuple[str, float]]]:
    """The latency of a block, and its parts as a breakdown names them."""
    compute, exposed = split_mean(block)
    parts = [*compute.items()]
    for group, seconds in exposed.items():
        degree = group.removesuffix("-peers")
        parts.append((f"exposed {_DEGREES.get(degree, degree)}", seconds))
    return sum(compute.values()) + sum(exposed.values()), parts


def _of_stages(of: Frame, step: ConstantStep) -> tuple[float, ...]:
    """The time of the ops of each stage; half of an overlapped pair counts for each of its two."""
    seconds = np.zeros(1 + max(max(kind.stage, kind.other_stage) for kind in of.kinds))
    for kind, total in zip(of.kinds, np.bincount(of.kind_of, step.latencies), strict=True):
        if kind.phase != SEND_RECV:
            for stage in (kind.stage, kind.stage if kind.other_stage < 0 else kind.other_stage):
                seconds[stage] += total / 2
    return tuple(seconds.tolist())
