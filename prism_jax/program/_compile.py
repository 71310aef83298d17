"""Compiles a model, its layout, a schedule and a cluster to a program: from configuration to
arrays.
"""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from .._misc import OutOfMemoryWarning
from ..cluster import clock_factors
from ..data import (
    Cluster,
    Device,
    Job,
    Kernels,
    Layout,
    Model,
    ScheduleConfig,
    Training,
    Variation,
    has_seconds,
)
from ..latency import Empirical
from ..lowering import (
    blocks_of_kinds,
    cut_at_sinks,
    frame_of,
    job_parts,
    lay_out,
    lower_chains,
    number_microbatches,
    sinks_of,
    when_reduced,
)
from ..prediction import shortage
from ..schedule import AbstractSchedule, OpGraph, group_ends
from ..workload import Block, Costs, Workload, block_mean, block_means, has_experts, split_mean
from ._assemble import assemble
from ._program import Program
from ._variability import Variability, variability_of


# Kernels that the clock bounds. All others only move bytes, and do not feel it.
_BOUND = ("gemm", "convolution", "attention")
# `Empirical` has its nodes at equally spaced normal scores from -6 to 6.
_SCORES = np.linspace(-6.0, 6.0, 129)


def compile_job(job: Job) -> Program:
    """Compiles a job to a program. See [`compile_program`][].

    **Arguments:**

    - `job`: from `load_job`.

    **Returns:**

    A [`Program`][].

    **Warns:**

    [`prism_jax.OutOfMemoryWarning`][] if the job needs more memory than is usable of its devices.

    **Raises:**

    `ValueError` if the job has no model, or if its layout does not fit the model.
    """
    parts = job_parts(job)
    try:
        program = _compile(parts)
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None
    if lacking := shortage(job):
        problem = f"{lacking}; use another layout, which `prism.rank_layouts` finds, or more GPUs."
        warnings.warn(OutOfMemoryWarning(problem), stacklevel=2)
    return program


def compile_program(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig | AbstractSchedule,
    cluster: Cluster,
    *,
    training: Training,
    kernels: Kernels,
    variability: Variability | None = None,
) -> Program:
    """Compiles a training step to a program.

    **Arguments:**

    - `model`, `layout`, `training`: what is trained and how it is laid out.
    - `schedule`: the order of the ops: the `schedule` of a job, or any schedule object, over whose
        stages the layers are distributed evenly.
    - `cluster`: the machine.
    - `kernels`: how fast the kernels of the machine are, and how much they vary.
    - `variability`: laws to use instead of those of `kernels`.

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` if the layout does not fit the model or the cluster, or if the schedule deadlocks.
    """
    if isinstance(schedule, ScheduleConfig):
        config, order = schedule, None
    else:
        config, order = _config_of(schedule, layout), schedule
    return _compile(Costs(model, layout, config, training, cluster, kernels), order, variability)


def _compile(
    job: Costs,
    order: AbstractSchedule | None = None,
    variability: Variability | None = None,
) -> Program:
    order, graph, workload = lay_out(job, order)
    layout, cluster, kernels = job.layout, job.cluster, job.kernels
    of, sinks = frame_of(graph), sinks_of(graph, workload)
    of_kinds = blocks_of_kinds(workload, of.kinds)
    blocks = [of_kinds[kind] for kind in of.kind_of.tolist()]
    if variability is None:

        def excess(slowdown: float) -> float:
            congested = _constant_step(graph, _congested(job, order, slowdown))
            return congested / _constant_step(graph, workload) - 1

        step_s = _seconds(graph, blocks, workload) if has_seconds(kernels.variability) else math.inf
        variability = variability_of(
            [*_of_packing(job, blocks), *kernels.variability],
            step_s=step_s,
            experts=has_experts(job.model),
            by_power=lambda: _rank_of_power(cluster.device, blocks),
            excess=excess,
        )
    graph, blocks, sinks = cut_at_sinks(graph, blocks, sinks)
    return assemble(
        number_microbatches(graph, order.chain_starts),
        blocks,
        variability=variability,
        sinks=sinks,
        contention=workload.contention,
        tail=workload.tail,
        members=workload.members,
        group_size=workload.group_size,
        # Replicas that share experts meet in every microbatch, so they count as one replica.
        num_replicas=layout.tp * layout.cp * layout.dp // workload.group_size,
        # The innermost link joins the devices of a node; all other links share the network.
        network_links=tuple(link.name for link in cluster.links[1:]),
    )


def _seconds(graph: OpGraph, blocks: list[Block], workload: Workload) -> float:
    """About how long a step takes, in seconds: without variability, and without what of the
    reduction of gradients does not overlap.
    """
    (end,) = group_ends(graph, np.array(block_means(blocks)), [range(graph.num_ops)])
    return float(end) + block_mean(workload.tail)


def _congested(job: Costs, order: AbstractSchedule, slowdown: float) -> Workload:
    """The workload if communication between nodes takes `slowdown` times as long."""
    kernels = msgspec.structs.replace(job.kernels, network=slowdown * job.kernels.network)
    return lower_chains(msgspec.structs.replace(job, kernels=kernels), order)


def _constant_step(graph: OpGraph, workload: Workload) -> float:
    """How long a step takes without variability, in seconds."""
    of, sinks = frame_of(graph), sinks_of(graph, workload)
    latencies = np.array(block_means(blocks_of_kinds(workload, of.kinds)))[of.kind_of]
    ends = group_ends(graph, latencies, [sink.ops for sink in sinks])
    reduced = when_reduced(sinks, ends, workload.contention)
    return float(np.max(reduced)) + block_mean(workload.tail)


def _rank_of_power(device: Device, blocks: Sequence[Block]) -> Empirical:
    """The factor of a GPU on its compute, from what GPUs of a device leak.

    The factors of products and of attention, weighted with their shares of the job's compute. A GPU
    has one factor for all of it, so that ops with larger shares get too little.

    **Arguments:**

    - `device`: the job's device.
    - `blocks`: the block of each op.

    **Raises:**

    `ValueError` if it is not known what the device draws.
    """
    if device.power is None:
        raise ValueError(
            f"the law of the rank: what the device `{device.name}` draws is not known; give "
            "another family than `power`, or add `[power]` to the device's file."
        )
    table, shares = np.ones_like(_SCORES), _shares(blocks)
    for kind in _BOUND:
        table += shares.get(kind, 0.0) * (clock_factors(device.power, kind, _SCORES) - 1)
    return Empirical(table)


def _of_packing(job: Costs, blocks: Sequence[Block]) -> list[Variation]:
    """The law of microbatches whose sequences have lengths of their own: attention takes longer by
    the sum of their squares, in the share of compute that it is. One that was measured holds
    instead.
    """
    training = job.training
    if training.packed is None or job.kernels.find_variation("microbatch"):
        return []
    tokens = training.microbatch_size * training.sequence_length
    spread = training.packed.spread(training.sequence_length, tokens)
    spread *= _shares(blocks).get("attention", 0.0)
    law = {"sigma": math.sqrt(math.log1p(spread**2))}
    return [Variation("", "microbatch", "lognormal", law, "training.packed")]


def _shares(blocks: Sequence[Block]) -> dict[str, float]:
    """The share of each kind of kernel in the compute of the blocks of ops."""
    compute: defaultdict[str, float] = defaultdict(float)
    by_identity = {id(block): block for block in blocks}  # Most ops have the same block.
    for key, number in Counter(map(id, blocks)).items():
        for kind, seconds in split_mean(by_identity[key])[0].items():
            compute[kind] += number * seconds
    total = sum(compute.values()) or 1.0
    return {kind: seconds / total for kind, seconds in compute.items()}


def _config_of(schedule: AbstractSchedule, layout: Layout) -> ScheduleConfig:
    if schedule.num_ranks != layout.pp:
        raise ValueError(
            f"The schedule is for {schedule.num_ranks} pipeline ranks, but `layout.pp` is "
            f"{layout.pp}; change one of them."
        )
    stages, chains = schedule.num_stages, len(schedule.chain_starts)
    if schedule.chain_starts != tuple(range(0, stages, stages // chains)) or (
        stages % (chains * layout.pp) != 0
    ):
        raise ValueError(
            f"The schedule's stages, chains and ranks are {stages}, {chains} and {layout.pp}; "
            "layers can only be distributed over chains of one length with equally many stages on "
            "each rank."
        )
    return ScheduleConfig(
        kind=type(schedule).__name__,
        num_microbatches=schedule.num_microbatches,
        virtual_stages=stages // (chains * layout.pp),
        microbatch_group_size=schedule.microbatch_group_size,
    )
