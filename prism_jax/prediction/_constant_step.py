"""A job's step without variability, on the host, for solvers that evaluate it many times."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from ..data import Job, Kernels, check_parts
from ..program import (
    Frame,
    blocks_of_kinds,
    frame_of,
    lower_chains,
    parts_of,
    sinks_of,
    when_reduced,
)
from ..schedule import latest_ends, op_graph, order_of
from ..workload import Workload, block_mean, block_means


@dataclasses.dataclass(frozen=True)
class ConstantStep:
    """A step of constant latencies, in seconds.

    **Attributes:**

    - `seconds`: the step time.
    - `latencies`: the latency of each op.
    - `reduced`: the exposed part of the gradient reduction of each pipeline rank.
    """

    seconds: float
    latencies: Float[np.ndarray, "ops"]
    reduced: Float[np.ndarray, "ranks"]


def run(of: Frame, workload: Workload) -> ConstantStep:
    """A step of a workload."""
    means = block_means(blocks_of_kinds(workload, of.kinds))
    return _replayed(of, workload, np.array(means)[of.kind_of])


def without_send_recv(of: Frame, workload: Workload, step: ConstantStep) -> ConstantStep:
    """The step if sends between pipeline ranks took no time."""
    return _replayed(of, workload, np.where(of.is_send_recv, 0.0, step.latencies))


def _replayed(of: Frame, workload: Workload, latencies: Float[np.ndarray, "ops"]) -> ConstantStep:
    sinks = sinks_of(of.graph, workload)
    ends = latest_ends(of.graph, latencies, [sink.ops for sink in sinks])
    reduced = when_reduced(sinks, ends, workload.contention)
    last = ends[np.flatnonzero(np.diff([sink.rank for sink in sinks], append=-1))]
    seconds = float(np.max(reduced) + block_mean(workload.tail))
    return ConstantStep(seconds, latencies, reduced - last)


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
    order = order_of(job.schedule, job.layout)
    blocking = order.blocking if job.schedule.blocking is None else job.schedule.blocking
    of = frame_of(op_graph(order, blocking=blocking))

    def seconds(kernels: Kernels) -> float:
        parts = (model, job.layout, job.schedule, training, cluster, kernels)
        return run(of, lower_chains(*parts, order)).seconds

    return seconds
