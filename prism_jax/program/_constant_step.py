"""A job's step if nothing varied, on the host: for what is solved for, again and again."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from ..data import Job, Kernels, check_parts
from ..schedule import op_graph, order_of, rank_ends
from ..workload import Workload, block_mean, block_means
from ._chains import lower_chains
from ._compile import parts_of
from ._frame import Frame, block_of_kind, frame_of


@dataclasses.dataclass(frozen=True)
class ConstantStep:
    """A step of constant latencies, in seconds.

    **Attributes:**

    - `seconds`: all of it.
    - `latencies`: of each op.
    - `reduced`: for each pipeline rank, what nothing hides of the reduction of its gradients.
    - `tail`: what follows when all ranks have met.
    """

    seconds: float
    latencies: Float[np.ndarray, "ops"]
    reduced: Float[np.ndarray, "ranks"]
    tail: float


def run(of: Frame, workload: Workload) -> ConstantStep:
    """A step of a workload."""
    means = block_means([block_of_kind(workload, kind) for kind in of.kinds])
    latencies = np.array(means)[of.kind_of]
    reduced = np.array(block_means(workload.reduce_scatter))
    return _replayed(of, latencies, reduced, block_mean(workload.tail))


def without_send_recv(of: Frame, step: ConstantStep) -> ConstantStep:
    """The step if what pipeline ranks send took no time."""
    latencies = np.where(of.is_send_recv, 0.0, step.latencies)
    return _replayed(of, latencies, step.reduced, step.tail)


def _replayed(of: Frame, latencies, reduced, tail: float) -> ConstantStep:
    last = rank_ends(of.graph, latencies)
    return ConstantStep(float(np.max(last + reduced) + tail), latencies, reduced, tail)


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
    of = frame_of(op_graph(order, blocking=blocking))

    def seconds(kernels: Kernels) -> float:
        parts = (model, job.layout, job.schedule, training, cluster, kernels)
        return run(of, lower_chains(*parts, order)).seconds

    return seconds
