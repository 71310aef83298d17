"""A job with a model and a machine as the graph of its ops, their kinds and their kernels; also for
schedules of several chains of stages, each of which is the whole model.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Int

from .._misc import check_type
from ..data import Job, check_parts
from ..schedule import (
    SEND_RECV,
    AbstractSchedule,
    ForwardOnly,
    OpGraph,
    op_graph,
    order_of,
    phases_of,
)
from ..workload import Block, Costs, Reduction, Segment, Workload, block_means, lower, pair


def job_parts(job: Job, purpose: str = "predict its step") -> Costs:
    """The parts of a job that has a model and a machine.

    **Raises:**

    `ValueError` if the job has none, which it needs for the `purpose`.
    """
    check_type(job, Job, "job", "use `load_job` to get one")
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            f"`training` to {purpose}."
        )
    return Costs(job.model, job.layout, job.schedule, job.training, job.cluster, job.kernels)


def lay_out(
    job: Costs, order: AbstractSchedule | None = None
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


def graph_of(job: Costs, order: AbstractSchedule) -> OpGraph:
    """The graph of an order, in which send_recvs block if the job or else the schedule says so."""
    blocking = job.schedule.blocking
    return op_graph(order, blocking=order.blocking if blocking is None else blocking)


def _with_costs(schedule: AbstractSchedule, workload: Workload) -> AbstractSchedule:
    """The schedule, optimised for the mean latencies of the blocks and of the slowest send_recv."""
    names = ("forward", "backward_input", "backward_weight")
    means = {name: block_means(getattr(workload, name)) for name in names}
    send_recv = max((kernel.mean for kernel in workload.send_recv.values()), default=0.0)
    return schedule.with_costs(**means, send_recv=send_recv)


def lower_chains(job: Costs, schedule: AbstractSchedule) -> Workload:
    """`lower`, for a schedule that may have several chains, such as DualPipe.

    A rank holds a copy of the parameters for each chain. The copies of a stage reduce their
    gradients together, over all replicas, and share the optimizer's states.
    """
    runs = phases_of(schedule)
    chains = [lower(job, ranks, runs) for ranks in schedule.ranks_of_chains]
    if len(chains) == 1:
        return chains[0]
    if job.training.accumulate_gradients:
        raise ValueError(
            "the schedule has two copies of the model, whose gradients cannot be accumulated in "
            "turn; leave `training.accumulate_gradients` false, or use a schedule of one copy."
        )
    copies = msgspec.structs.replace(job.layout, dp=job.layout.dp * len(chains))
    of_copies = msgspec.structs.replace(job, layout=copies)
    passes = [chain.passes for chain in chains if chain.passes is not None]
    reduced = [lower(of_copies, ranks, ()) for ranks in schedule.ranks_of_chains]
    phases = ("forward", "backward", "backward_input", "backward_weight")
    pairs = msgspec.structs.replace(passes[0], **_joined(passes, phases[:2])) if passes else None
    return msgspec.structs.replace(
        chains[0],
        **_joined(chains, phases),
        passes=pairs,
        send_recv={pair: kernel for chain in chains for pair, kernel in chain.send_recv.items()},
        reductions=tuple(
            tuple(
                _of_copies(reduction, schedule.chain_starts, chain)
                for chain, reductions in enumerate(of_rank)
                for reduction in reductions
            )
            for of_rank in zip(*(chain.reductions for chain in reduced), strict=True)
        ),
        # What a step has besides its kernels, it has once.
        tail=(*reduced[0].tail, *it.chain(*(_without_host(chain.tail) for chain in reduced[1:]))),
    )


def _joined(chains: Sequence[Any], phases: Sequence[str]) -> dict[str, tuple]:
    """What the stages of each chain have in some phases, of all chains."""
    return {name: tuple(it.chain(*(getattr(chain, name) for chain in chains))) for name in phases}


def _without_host(block: Block) -> Block:
    def kept(segment: Segment) -> Segment:
        kernels = tuple(row for row in segment.kernels if row[0].kind != "host")
        return msgspec.structs.replace(segment, kernels=kernels)

    return tuple((kept(segment), times) for segment, times in block)


def _of_copies(reduction: Reduction, chain_starts: Sequence[int], chain: int) -> Reduction:
    """A reduction of one chain that also waits for the copies of its stage."""
    starts = (chain_starts[chain], *chain_starts[:chain], *chain_starts[chain + 1 :])
    stages = tuple(start + stage for stage in reduction.stages for start in starts)
    return Reduction(reduction.kernels, stages)


def number_microbatches(graph: OpGraph, chain_starts: tuple[int, ...]) -> OpGraph:
    """The graph with distinct numbers for the microbatches of different chains."""
    chain = np.searchsorted(np.array(chain_starts), graph.stage, side="right") - 1
    per_chain = graph.microbatch.max(initial=0) + 1
    return dataclasses.replace(graph, microbatch=graph.microbatch + chain * per_chain)


class OpKind(NamedTuple):
    """Everything that decides the kernels of an op; see `OpGraph`."""

    phase: str
    stage: int
    other_stage: int
    rank: int
    peer: int


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The parts of a step that do not depend on latencies.

    **Attributes:**

    - `graph`: the ops.
    - `kinds`: the kinds of ops, each once.
    - `kind_of`: for each op, the position of its kind.
    """

    graph: OpGraph
    kinds: tuple[OpKind, ...]
    kind_of: Int[np.ndarray, "ops"]

    @property
    def is_send_recv(self) -> Bool[np.ndarray, "ops"]:
        """Whether each op is a send_recv."""
        return np.array([kind.phase == SEND_RECV for kind in self.kinds], bool)[self.kind_of]


# As many as the graphs that `op_graph` keeps and returns again.
@ft.lru_cache(maxsize=4)
def frame_of(graph: OpGraph) -> Frame:
    """The kinds of the ops of a graph."""
    columns = (graph.phase, graph.stage, graph.other_stage, graph.rank, graph.peer)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    numbers = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    kind_of = np.array([numbers[row] for row in rows])
    return Frame(graph, tuple(OpKind(*row) for row in numbers), kind_of)


def blocks_of_kinds(workload: Workload, kinds: Sequence[OpKind]) -> list[Block]:
    """The block of each kind of op. Equal pairs of stages share a block, as do sends between the
    same two ranks.
    """
    pairs: dict[tuple[int, int], Block] = {}
    sends = {ends: ((Segment((), kernel), 1),) for ends, kernel in workload.send_recv.items()}
    phases = {
        "F": workload.forward,
        "B": workload.backward,
        "I": workload.backward_input,
        "W": workload.backward_weight,
    }

    def of_kind(kind: OpKind) -> Block:
        if kind.phase == SEND_RECV:
            return sends.get((kind.rank, kind.peer), ())
        if kind.phase in phases:
            return phases[kind.phase][kind.stage]
        apart = workload.forward[kind.stage] + workload.backward[kind.other_stage]
        passes = workload.passes
        if passes is None:
            return apart
        alike = id(passes.forward[kind.stage]), id(passes.backward[kind.other_stage])
        if alike not in pairs:
            beside = pair(passes, kind.stage, kind.other_stage)
            pairs[alike] = apart if beside is None else beside
        return pairs[alike]

    return [of_kind(kind) for kind in kinds]
