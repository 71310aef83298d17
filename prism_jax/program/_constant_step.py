"""A job's step if nothing varied, on the host: for what is solved for, again and again."""

from collections.abc import Callable

import numpy as np

from ..data import Job, Kernels, check_parts
from ..schedule import OVERLAPPED, SEND_RECV, op_graph, order_of, replay
from ..workload import Workload, block_mean
from ._chains import lower_chains
from ._compile import parts_of


def constant_step(job: Job) -> Callable[[Kernels], float]:
    """A function from a job's kernels to the step time if every latency were its mean, in seconds.

    The graph is built once, so that a call takes some milliseconds for some thousand ops. It is
    below the mean of steps that vary, which wait for the slowest.

    **Arguments:**

    - `job`: with a model and a cluster; its own kernels are not looked at.

    **Raises:**

    `ValueError` as `compile_job`.
    """
    model, cluster, training, _ = parts_of(job)
    check_parts(model, job.layout, job.schedule, training, cluster)
    order = order_of(job.schedule, job.layout)
    blocking = order.blocking if job.schedule.blocking is None else job.schedule.blocking
    graph = op_graph(order, blocking=blocking)
    columns = (graph.phase, graph.stage, graph.other_stage, graph.rank, graph.peer)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    different = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    number = np.array([different[row] for row in rows])

    def seconds(kernels: Kernels) -> float:
        parts = (model, job.layout, job.schedule, training, cluster, kernels)
        workload = lower_chains(*parts, order)
        latencies = np.array([_mean(workload, *row) for row in different])[number]
        _, ends = replay(graph.predecessors, latencies)
        last = np.array([ends[list(ops)].max(initial=0.0) for ops in graph.last])
        reduced = np.array([block_mean(block) for block in workload.reduce_scatter])
        return float(np.max(last + reduced) + block_mean(workload.tail))

    return seconds


def _mean(workload: Workload, phase: str, stage: int, other: int, rank: int, peer: int) -> float:
    """The mean latency of an op; as of `blocks_of`, which has them all one by one."""
    if phase == SEND_RECV:
        return workload.send_recv[rank, peer].mean
    if phase == OVERLAPPED:
        return block_mean(workload.forward[stage]) + block_mean(workload.backward[other])
    phases = {
        "F": workload.forward,
        "B": workload.backward,
        "I": workload.backward_input,
        "W": workload.backward_weight,
    }
    return block_mean(phases[phase][stage])
