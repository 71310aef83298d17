"""Compiles a model, its layout, a schedule and a cluster to a program: from configuration to
arrays.
"""

import math

import numpy as np

from ..data import (
    Cluster,
    Job,
    Kernels,
    Layout,
    Model,
    ScheduleConfig,
    Training,
    check_parts,
    has_seconds,
)
from ..schedule import (
    AbstractSchedule,
    ForwardOnly,
    OpGraph,
    latest_ends,
    op_graph,
    order_of,
)
from ..workload import Block, Workload, block_mean, block_means, has_experts
from ._assemble import assemble
from ._chains import lower_chains, number_microbatches
from ._frame import blocks_of_kinds, frame_of
from ._program import Program
from ._rank_power import rank_of_power
from ._sinks import cut_at_sinks, sinks_of
from ._variability import Variability, variability_of


def compile_job(job: Job) -> Program:
    """Compiles a job to a program. See [`compile_program`][].

    **Arguments:**

    - `job`: from `load_job`.

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` if the job has no model, or if its layout does not fit the model.
    """
    model, cluster, training, kernels = parts_of(job)
    try:
        return compile_program(
            model,
            job.layout,
            job.schedule,
            cluster,
            training=training,
            kernels=kernels,
        )
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None


def parts_of(job: Job) -> tuple[Model, Cluster, Training, Kernels]:
    """The model, the cluster, the training and the kernels of a job.

    **Raises:**

    `ValueError` if the job has none.
    """
    if not isinstance(job, Job):
        raise ValueError(
            f"A {type(job).__name__} was given in place of a job; use `load_job`, which takes the "
            "name of a shipped job or the path of a file."
        )
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            "`training` to predict its step."
        )
    return job.model, job.cluster, job.training, job.kernels


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
    config = schedule if isinstance(schedule, ScheduleConfig) else _config_of(schedule, layout)
    check_parts(model, layout, config, training, cluster)
    if isinstance(schedule, ScheduleConfig):
        order = order_of(schedule, layout, training)
    else:
        order = ForwardOnly(schedule) if training.forward_only else schedule
    workload = lower_chains(model, layout, config, training, cluster, kernels, order)
    order = with_costs(order, workload)
    blocking = order.blocking if config.blocking is None else config.blocking
    graph = op_graph(order, blocking=blocking)
    blocks, sinks = blocks_of(graph, workload), sinks_of(graph, workload)
    if variability is None:
        step_s = _seconds(graph, blocks, workload) if has_seconds(kernels.variability) else math.inf
        variability = variability_of(
            kernels.variability,
            step_s=step_s,
            experts=has_experts(model),
            by_power=lambda: rank_of_power(cluster.device, blocks),
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
    (end,) = latest_ends(graph, np.array(block_means(blocks)), [range(graph.num_ops)])
    return float(end) + block_mean(workload.tail)


def with_costs(schedule: AbstractSchedule, workload: Workload) -> AbstractSchedule:
    """The schedule, optimised for the mean latencies of the blocks and of the slowest send_recv."""
    names = ("forward", "backward_input", "backward_weight")
    means = {name: block_means(getattr(workload, name)) for name in names}
    send_recv = max((kernel.mean for kernel in workload.send_recv.values()), default=0.0)
    return schedule.with_costs(**means, send_recv=send_recv)


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
            f"The schedule has {stages} stages in {chains} chains on {layout.pp} ranks; layers can "
            "only be distributed over chains of one length with equally many stages on each rank."
        )
    return ScheduleConfig(
        kind=type(schedule).__name__,
        num_microbatches=schedule.num_microbatches,
        virtual_stages=stages // (chains * layout.pp),
        microbatch_group_size=schedule.microbatch_group_size,
    )


def blocks_of(graph: OpGraph, workload: Workload) -> list[Block]:
    """The block of each op of a graph."""
    of = frame_of(graph)
    blocks = blocks_of_kinds(workload, of.kinds)
    return [blocks[kind] for kind in of.kind_of.tolist()]
