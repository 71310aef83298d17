"""From a model, its layout, a schedule and a cluster to a program: the door from configuration to
arrays.
"""

from typing import Literal

from ..data import (
    Cluster,
    Job,
    Kernels,
    Layout,
    Model,
    ScheduleConfig,
    Training,
    check_parts,
)
from ..schedule import make_schedule, op_graph
from ..workload import Block, Segment, Workload, lower
from ._assemble import assemble
from ._program import Program
from ._variability import Variability, variability_of


def compile_job(job: Job, *, resolution: Literal["block", "kernel"] = "block") -> Program:
    """Compiles a job. See `compile_program`.

    **Arguments:**

    - `job`: from `load_job`.
    - `resolution`: `"block"` collapses the kernels of a block; `"kernel"` draws them all (a check).

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` where the job has no model, or its layout does not fit it.
    """
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            "`training` to predict its step."
        )
    try:
        return compile_program(
            job.model,
            job.layout,
            job.schedule,
            job.cluster,
            training=job.training,
            kernels=job.kernels,
            resolution=resolution,
        )
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None


def compile_program(
    model: Model,
    layout: Layout,
    schedule: ScheduleConfig,
    cluster: Cluster,
    *,
    training: Training,
    kernels: Kernels,
    variability: Variability | None = None,
    resolution: Literal["block", "kernel"] = "block",
) -> Program:
    """Compiles a training step.

    **Arguments:**

    - `model`, `layout`, `schedule`, `training`: what is trained and how it is laid out.
    - `cluster`: the machine.
    - `kernels`: how fast its kernels are, and how much they vary.
    - `variability`: laws to use in place of those of `kernels`.
    - `resolution`: `"block"` collapses the kernels of a block; `"kernel"` draws them all (a check).

    **Returns:**

    A [`Program`][].

    **Raises:**

    `ValueError` where the layout does not fit the model or the cluster, or the schedule deadlocks.
    """
    check_parts(model, layout, schedule, training, cluster)
    workload = lower(model, layout, schedule, training, cluster, kernels)
    order = make_schedule(
        schedule.kind,
        num_ranks=layout.pp,
        num_microbatches=schedule.num_microbatches,
        virtual_stages=schedule.virtual_stages,
        microbatch_group_size=schedule.microbatch_group_size,
    )
    blocking = schedule.blocking
    if blocking is None:
        blocking = schedule.kind == "1f1b"  # As Megatron-LM's, which cannot overlap them.
    graph = op_graph(order, blocking=blocking)
    return assemble(
        graph,
        blocks_of(graph, workload),
        variability=variability_of(kernels.variability) if variability is None else variability,
        reduce_scatter=workload.reduce_scatter,
        tail=workload.tail,
        group_size=workload.group_size,
        num_replicas=layout.dp,
        # The innermost link joins the devices of a node; what goes further shares the network.
        network_links=tuple(link.name for link in cluster.links[1:]),
        resolution=resolution,
    )


def blocks_of(graph, workload: Workload) -> list[Block]:
    """The block of each op of a graph."""
    transfers = {pair: ((Segment((), kernel), 1),) for pair, kernel in workload.send_recv.items()}
    phases = {"F": workload.forward, "B": workload.backward}
    columns = (graph.phase, graph.stage, graph.rank, graph.peer)
    return [
        transfers[rank, peer] if phase == "SR" else phases[phase][stage]
        for phase, stage, rank, peer in zip(*(c.tolist() for c in columns), strict=True)
    ]
