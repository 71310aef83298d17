"""A time that a step takes at least: the work of its ranks, without building the order of ops."""

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..data import Job, ScheduleConfig
from ..lowering import job_parts
from ..workload import block_means, layers_of_stages, lower, split_mean


# Schedules in which the first stages stand on the ranks in turn and no two ops overlap: the last of
# these ranks waits for the forwards before it, and the step goes on with their backwards after it.
_IN_TURN = ("1f1b", "interleaved-1f1b", "gpipe", "looped-bfs")


class ModelPasses(NamedTuple):
    """The forward and backward of one microbatch through a whole model, in seconds.

    **Attributes:**

    - `first`, `layers`, `last`: those of the embedding, of all layers, and of the head.
    - `compute`: the part of their sum that is not communication.
    """

    first: float
    layers: float
    last: float
    compute: float


def least_seconds(
    job: Job, known: dict[tuple[Any, ...], ModelPasses], *, sharded: bool = False
) -> float:
    """A lower bound on the predicted step of a job, in seconds; zero for a job that has none.

    **Arguments:**

    - `known`: the passes of jobs before this one, which it may share; this adds to them. All of
        these jobs must be kept, because it knows their models by identity.
    - `sharded`: whether the communication for sharded gradients and parameters counts. This bound
        is higher, but fewer jobs share their passes.
    """
    layout, schedule = job.layout, job.schedule
    try:
        model, passes = job_parts(job).model, _passes_of(job, known, False)
        if sharded:  # At the two ends, gathers may be hidden by what the layers compute.
            passes = passes._replace(layers=_passes_of(job, known, True).layers)
        layers = np.array(layers_of_stages(model, layout, schedule), float)
    except ValueError:
        return 0.0
    number = schedule.num_microbatches
    if schedule.kind not in _IN_TURN:
        return number * passes.compute / layout.pp
    if len(model.layers or ()) > 1:
        return number * sum(passes[:3]) / layout.pp
    seconds = layers * (passes.layers / model.num_layers)
    seconds[0] += passes.first
    seconds[-1] += passes.last
    of_ranks = seconds.reshape(-1, layout.pp)
    before = np.cumsum(of_ranks[0]) - of_ranks[0]
    return float(np.max(before + number * of_ranks.sum(axis=0)))


def _passes_of(job: Job, known: dict[tuple[Any, ...], ModelPasses], sharded: bool) -> ModelPasses:
    parts = job_parts(job)
    layout, training, model, dp = job.layout, parts.training, parts.model, job.layout.dp
    if not sharded:
        experts = layout.ep * layout.expert_tp
        dp = experts // math.gcd(experts, layout.tp * layout.cp)
        training = msgspec.structs.replace(training, zero=0, optimizer_instances=1)
    if training.recompute_method == "block":  # Which layers it recomputes depends on the stage.
        training = msgspec.structs.replace(training, recompute="none")
    one_rank = msgspec.structs.replace(layout, pp=1, dp=dp)
    key = (id(model), id(parts.cluster), id(parts.kernels), one_rank, training)
    if key not in known:
        stages = ScheduleConfig(
            "1f1b", 1, virtual_stages=3, layers_per_stage=(0, model.num_layers, 0)
        )
        changes = {"layout": one_rank, "schedule": stages, "training": training}
        work = lower(msgspec.structs.replace(parts, **changes), (0, 0, 0))
        seconds = [*zip(block_means(work.forward), block_means(work.backward), strict=True)]
        compute = sum(
            sum(split_mean(block)[0].values()) for block in (*work.forward, *work.backward)
        )
        known[key] = ModelPasses(sum(seconds[0]), sum(seconds[1]), sum(seconds[2]), compute)
    return known[key]
