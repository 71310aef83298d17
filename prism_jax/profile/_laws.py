"""The laws of a traced job's kernels, from the components of its compute."""

import numpy as np
from jaxtyping import Float

from ..data import Job, Variation
from ..program import StepGraph
from ._components import Apart, data_of, take_apart
from ._data_factor import DataFactor
from ._family import best_family
from ._mean_squares import Logs
from ._stalls import Stalls


def compute_apart(
    job: Job,
    step: StepGraph,
    latencies: Float[np.ndarray, "ops steps"],
    steps: np.ndarray,
    step_times: Float[np.ndarray, " steps"],
) -> Apart:
    """Splits the latencies of compute into components; stalled ones are `nan`. See `take_apart`."""
    return take_apart(compute_logs(job, step, latencies), steps, step_times)


def relative_latencies(
    job: Job, step: StepGraph, data: DataFactor
) -> Float[np.ndarray, "ops steps"]:
    """The latency of each op from its microbatch's data, over its mean; one for other ops."""
    ops, place = places(job, step)
    relative = np.ones((len(step.kind), data.factor.shape[-1]))
    relative[ops] = data.relative[place]
    return relative


def first_look(job: Job, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]) -> DataFactor:
    """The data of microbatches, from latencies that still include stalls."""
    return data_of(compute_logs(job, step, latencies))


def compute_logs(job: Job, step: StepGraph, latencies: Float[np.ndarray, "ops steps"]) -> Logs:
    """Logarithms of the latencies of compute."""
    ops, place = places(job, step)
    shape = (job.layout.dp, job.layout.pp, len(step.phases), job.schedule.num_microbatches)
    logs = np.full((*shape, latencies.shape[1]), np.nan)
    logs[place] = np.log(np.where(latencies[ops] > 0, latencies[ops], np.nan))
    return logs


def places(job: Job, step: StepGraph) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The ops of compute, and the replica, stage, phase and microbatch of each."""
    ops, phases = np.flatnonzero(step.computes), step.phases
    worker = np.array([step.members[op][0] for op in ops])
    phase = np.array([phases.index(step.kind[op]) for op in ops])
    call = np.array([step.call[op] for op in ops])
    return ops, (*np.divmod(worker, job.layout.pp), phase, call)


def laws_of_components(
    job: Job,
    step: StepGraph,
    stalls: Stalls,
    means: Float[np.ndarray, " ops"],
    apart: Apart,
    source: str,
) -> tuple[Variation, ...]:
    """The laws with these components.

    **Arguments:**

    - `job`, `step`, `stalls`: the traced job, its graph, and its stalls.
    - `means`: the mean latency of each op, without stalls.
    - `apart`: the components of the latencies of compute.
    - `source`: where the laws are from.
    """
    shared = [
        Variation("", name, "lognormal", {"sigma": apart.value(name)}, source)
        for name in ("step", "worker_step")
        if apart.value(name)
    ]
    ratios = np.where(means > 0, stalls.body.T / np.where(means > 0, means, 1), np.nan).T
    ops, place = places(job, step)
    ratios[ops] = np.exp(apart.residual[place])
    kinds = np.array(step.kind)
    residuals = []
    for kind in dict.fromkeys(step.kind):
        mine = ratios[kinds == kind]
        mine = mine[:, ~np.isnan(mine).all(axis=0)]
        if kind not in step.phases:
            mine = _without_step(mine, apart.value("step"))
        family, parameters = best_family(mine)
        if family != "constant":
            residuals.append(Variation(kind, "residual", family, parameters, source))
    return (*shared, *residuals, *stalls.laws)


def _without_step(
    ratios: Float[np.ndarray, "ops steps"], sigma: float
) -> Float[np.ndarray, "ops steps"]:
    """Ratios that are narrower by the factor of steps, which multiplies every op."""
    if not ratios.size or not np.nanvar(ratios):
        return ratios
    centre = np.nanmean(ratios)
    share = sigma**2 / (np.nanvar(ratios) / centre**2)
    return centre + (ratios - centre) * np.sqrt(max(1 - share, 0.0))
