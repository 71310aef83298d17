"""The ops of a traced step by kind and worker, and compute by replica, stage, phase, microbatch."""

import numpy as np
from jaxtyping import Float

from ..data import Job
from ..program import StepGraph
from ._data_factor import DataFactor
from ._mean_squares import Logs


def groups(step: StepGraph) -> dict[tuple[str, int], np.ndarray]:
    """The ops of each kind on each worker."""
    found: dict[tuple[str, int], list[int]] = {}
    for op, (kind, members) in enumerate(zip(step.kind, step.members, strict=True)):
        found.setdefault((kind, members[0]), []).append(op)
    return {key: np.array(ops) for key, ops in found.items()}


def places(job: Job, step: StepGraph) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The ops of compute, and the replica, stage, phase and microbatch of each."""
    ops, phases = np.flatnonzero(step.computes), step.phases
    worker = np.array([step.members[op][0] for op in ops])
    phase = np.array([phases.index(step.kind[op]) for op in ops])
    call = np.array([step.call[op] for op in ops])
    return ops, (*np.divmod(worker, job.layout.pp), phase, call)


def compute_logs(job: Job, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]) -> Logs:
    """Logarithms of the latencies of compute; `nan` for those that are `nan` or not positive."""
    ops, place = places(job, step)
    shape = (job.layout.dp, job.layout.pp, len(step.phases), job.schedule.num_microbatches)
    logs = np.full((*shape, latencies.shape[1]), np.nan)
    logs[place] = np.log(np.where(latencies[ops] > 0, latencies[ops], np.nan))
    return logs


def relative_latencies(
    job: Job, step: StepGraph, data: DataFactor
) -> Float[np.ndarray, "ops steps"]:
    """The latency of each op from its microbatch's data, over its mean; one for other ops."""
    ops, place = places(job, step)
    relative = np.ones((len(step.kind), data.factor.shape[-1]))
    relative[ops] = data.relative[place]
    return relative
