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
from ..workload import Block, JobParts, Workload, block_mean, block_means, has_experts
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
    parts = parts_of(job)
    try:
        return _compile(parts)
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None


def parts_of(job: Job, purpose: str = "predict its step") -> JobParts:
    """The parts of a job that has a model and a machine.

    **Raises:**

    `ValueError` if the job has none, which it needs for the `purpose`.
    """
    if not isinstance(job, Job):
        raise ValueError(
            f"A {type(job).__name__} was given in place of a job; use `load_job`, which takes the "
            "name of a shipped job or the path of a file."
        )
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            f"`training` to {purpose}."
        )
    return JobParts(job.model, job.layout, job.schedule, job.training, job.cluster, job.kernels)


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
    return _compile(JobParts(model, layout, config, training, cluster, kernels), order, variability)


def lay_out(
    job: JobParts, order: AbstractSchedule | None = None
) -> tuple[AbstractSchedule, OpGraph, Workload]:
    """The schedule of a step, which knows the costs of its ops, their graph, and their kernels.

    **Arguments:**

    - `job`: the parts of a job.
    - `order`: a schedule to use instead of that of the job.

    **Raises:**

    `ValueError` if the layout does not fit the model or the cluster, or if the schedule deadlocks.
    """
    check_parts(job.model, job.layout, job.schedule, job.training, job.cluster)
    if order is None:
        order = order_of(job.schedule, job.layout, job.training)
    elif job.training.forward_only:
        order = ForwardOnly(order)
    workload = lower_chains(job, order)
    order = _with_costs(order, workload)
    return order, graph_of(job, order), workload


def graph_of(job: JobParts, order: AbstractSchedule) -> OpGraph:
    """The graph of an order, in which send_recvs block if the job or else the schedule says so."""
    blocking = job.schedule.blocking
    return op_graph(order, blocking=order.blocking if blocking is None else blocking)


def _compile(
    job: JobParts,
    order: AbstractSchedule | None = None,
    variability: Variability | None = None,
) -> Program:
    order, graph, workload = lay_out(job, order)
    layout, cluster, kernels = job.layout, job.cluster, job.kernels
    of, sinks = frame_of(graph), sinks_of(graph, workload)
    of_kinds = blocks_of_kinds(workload, of.kinds)
    blocks = [of_kinds[kind] for kind in of.kind_of.tolist()]
    if variability is None:
        step_s = _seconds(graph, blocks, workload) if has_seconds(kernels.variability) else math.inf
        variability = variability_of(
            kernels.variability,
            step_s=step_s,
            experts=has_experts(job.model),
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


def _with_costs(schedule: AbstractSchedule, workload: Workload) -> AbstractSchedule:
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
