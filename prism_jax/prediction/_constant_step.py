"""A job's step without variability, on the host, for solvers that evaluate it many times."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from ..data import Job, Kernels, check_parts
from ..program import (
    Frame,
    Sink,
    blocks_of_kinds,
    frame_of,
    lower_chains,
    parts_of,
    sinks_of,
    when_reduced,
)
from ..schedule import latest_ends, op_graph, order_of
from ..workload import Block, Workload, block_mean, block_means


@dataclasses.dataclass(frozen=True)
class ConstantStep:
    """A step of constant latencies, in seconds.

    **Attributes:**

    - `seconds`: the step time.
    - `latencies`: the latency of each op.
    - `reduced`: the exposed part of the gradient reduction of each pipeline rank.
    - `blocks`: the block of each kind of op.
    - `sinks`: the reductions of gradients.
    """

    seconds: float
    latencies: Float[np.ndarray, "ops"]
    reduced: Float[np.ndarray, "ranks"]
    blocks: Sequence[Block]
    sinks: Sequence[Sink]


def run(of: Frame, workload: Workload) -> ConstantStep:
    """A step of a workload."""
    blocks = blocks_of_kinds(workload, of.kinds)
    latencies = np.array(block_means(blocks))[of.kind_of]
    return _replayed(of, workload, latencies, blocks, sinks_of(of.graph, workload))


def without_send_recv(of: Frame, workload: Workload, step: ConstantStep) -> ConstantStep:
    """The step if sends between pipeline ranks took no time."""
    sends = of.is_send_recv
    if not sends.any():
        return step
    latencies = np.where(sends, 0.0, step.latencies)
    return _replayed(of, workload, latencies, step.blocks, step.sinks)


def _replayed(
    of: Frame,
    workload: Workload,
    latencies: Float[np.ndarray, "ops"],
    blocks: Sequence[Block],
    sinks: Sequence[Sink],
) -> ConstantStep:
    ends = latest_ends(of.graph, latencies, [sink.ops for sink in sinks])
    reduced = when_reduced(sinks, ends, workload.contention)
    last = ends[np.flatnonzero(np.diff([sink.rank for sink in sinks], append=-1))]
    seconds = float(np.max(reduced) + block_mean(workload.tail))
    return ConstantStep(seconds, latencies, reduced - last, blocks, sinks)


def constant_step(job: Job) -> Callable[[Kernels], float]:
    """A function from a job's kernels to the step time if every latency were its mean, in seconds.

    The graph is built once, so that a call takes some milliseconds for some thousand ops. It is
    below the mean of steps that vary, which wait for the slowest.

    **Arguments:**

    - `job`: a job with a model and a cluster. Its own kernels are not used.

    **Raises:**

    `ValueError` wherever `compile_job` raises it.
    """
    model, cluster, training, _ = parts_of(job)
    check_parts(model, job.layout, job.schedule, training, cluster)
    order = order_of(job.schedule, job.layout, training)
    blocking = order.blocking if job.schedule.blocking is None else job.schedule.blocking
    of = frame_of(op_graph(order, blocking=blocking))

    def seconds(kernels: Kernels) -> float:
        parts = (model, job.layout, job.schedule, training, cluster, kernels)
        return run(of, lower_chains(*parts, order)).seconds

    return seconds
