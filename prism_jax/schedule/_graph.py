"""The graph of a schedule: which op waits for which."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from .._ragged import group
from ._base import AbstractSchedule
from ._needs import Needs, find_needs
from ._ops import SEND_RECV, ScheduledOps, actions_of, describe_op, ops_of


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph:
    """The step of one replica as ops, and for each op the ops that it waits for.

    Ops are listed in a topological order: an op waits only for ops with smaller ids. It starts when
    the last of them has ended. Redundant dependencies are left out, so an op waits at most for the
    op before it on its rank and for the tensors that come from other ranks.

    **Attributes:**

    - `phase`: `F`, `B`, `I` (backward-input), `W` (backward-weight), `FB` (an overlapped pair) or
        `SR` (a send_recv).
    - `stage`, `microbatch`: of the op; of the forward of an overlapped pair; of the tensor that a
        send_recv sends, with the stage that sends it.
    - `rank`: the pipeline rank that it runs on; for a send_recv the rank that sends.
    - `peer`: for a send_recv the rank that receives, else -1.
    - `other_stage`, `other_microbatch`: of the backward of an overlapped pair, else -1.
    - `backward`: for a send_recv, whether a gradient travels rather than an activation.
    - `predecessors`: for each op, the ids of the ops that it waits for.
    - `orders`: for each rank, its compute ops in the order in which it runs them.
    - `last`: for each rank, the ops whose latest end is the end of the rank: its last compute op
        or, if send_recvs block, its last batch of send_recvs.
    """

    phase: Shaped[np.ndarray, "ops"]
    stage: Int[np.ndarray, "ops"]
    microbatch: Int[np.ndarray, "ops"]
    rank: Int[np.ndarray, "ops"]
    peer: Int[np.ndarray, "ops"]
    other_stage: Int[np.ndarray, "ops"]
    other_microbatch: Int[np.ndarray, "ops"]
    backward: Bool[np.ndarray, "ops"]
    predecessors: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    last: tuple[tuple[int, ...], ...]

    @property
    def num_ops(self) -> int:
        """The number of ops, send_recvs included."""
        return len(self.predecessors)

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.orders)

    @property
    def is_send_recv(self) -> Bool[np.ndarray, "ops"]:
        """Whether each op is a send_recv; all other ops compute."""
        return self.phase == SEND_RECV


def op_graph(schedule: AbstractSchedule, *, blocking: bool = False) -> OpGraph:
    """Builds the graph of a schedule's ops.

    **Arguments:**

    - `schedule`: any schedule.
    - `blocking`: by default, a send_recv is asynchronous: it starts when its producer has ended,
        and does not block any rank. With `blocking=True` it is a rendezvous, as in Megatron-LM's
        1F1B without interleaving: it starts when both ranks have reached it, and blocks both until
        all send_recvs of their batch have ended. All send_recvs of a rank between a forward and a
        backward are one batch. This requires one stage per rank and whole backwards.

    **Returns:**

    An [`prism_jax.OpGraph`][].

    **Raises:**

    A `ValueError` that names rank, stage and microbatch if the orders deadlock.
    """
    return _op_graph(schedule, blocking)


class _Nodes(NamedTuple):
    """A graph before it is numbered: nodes are the compute ops, then the send_recv of each need.

    Node `after[i]` waits for node `before[i]`.
    """

    before: np.ndarray
    after: np.ndarray
    last: list[list[int]]


# The costs of a schedule are often evaluated many times over.
@ft.lru_cache(maxsize=4)
def _op_graph(schedule: AbstractSchedule, blocking: bool) -> OpGraph:
    ops = ops_of(schedule)
    every = find_needs(ops, schedule.stage_to_rank, schedule.chain_starts)
    # The others follow from the orders.
    sent = ops.rank[every.producer] != ops.rank[every.consumer]
    needs = Needs(*(column[sent] for column in every))
    nodes = (_blocking if blocking else _asynchronous)(ops, needs)
    num_ops, num_sends = len(ops.rank), len(needs.producer)
    name = ft.partial(_describe, ops, needs)
    order = np.array(_topological_order(nodes, num_ops + num_sends, name), np.int64)
    new = np.empty(len(order), np.int64)
    new[order] = np.arange(len(order))
    before = group(new[nodes.after], new[nodes.before], len(order))
    waits, starts = tuple(before.values.tolist()), before.starts.tolist()
    new = new.tolist()

    def column(of_ops, of_sends):
        values = np.append(of_ops, np.broadcast_to(of_sends, num_sends))[order]
        values.setflags(write=False)
        return values

    return OpGraph(
        phase=column(ops.phase, SEND_RECV),
        stage=column(ops.stage, needs.stage),
        microbatch=column(ops.microbatch, needs.microbatch),
        rank=column(ops.rank, ops.rank[needs.producer]),
        peer=column(np.full(num_ops, -1), ops.rank[needs.consumer]),
        other_stage=column(ops.other_stage, -1),
        other_microbatch=column(ops.other_microbatch, -1),
        backward=column(np.zeros(num_ops, bool), needs.backward),
        predecessors=tuple(waits[a:b] for a, b in it.pairwise(starts)),
        orders=tuple(tuple(new[op] for op in span) for span in ops.orders),
        last=tuple(tuple(new[node] for node in last) for last in nodes.last),
    )


def _topological_order(nodes: _Nodes, num_nodes: int, describe: Callable[[int], str]) -> list[int]:
    """The nodes in an order in which each comes after all nodes that it waits for.

    **Arguments:**

    - `nodes`: which node waits for which.
    - `num_nodes`: how many there are.
    - `describe`: how an error names a node.

    **Raises:**

    A `ValueError` that names the nodes of a cycle.
    """
    followers = group(nodes.before, nodes.after, num_nodes)
    follower, start = followers.values.tolist(), followers.starts.tolist()
    missing = np.bincount(nodes.after, minlength=num_nodes).tolist()
    order = [node for node, count in enumerate(missing) if count == 0]
    # The list grows while it is walked: it is its own queue.
    for node in order:
        for after in follower[start[node] : start[node + 1]]:
            missing[after] -= 1
            if missing[after] == 0:
                order.append(after)
    if len(order) < num_nodes:
        cycle = _cycle(nodes, missing)
        path = ", ".join(describe(node) for node in cycle[1:4])
        raise ValueError(
            f"The orders deadlock: {describe(cycle[0])} waits for itself, by way of {path}"
            f"{' and others' if len(cycle) > 4 else ''}; change the order of these ranks, or the "
            "number of microbatches."
        )
    return order


def _cycle(nodes: _Nodes, missing: list[int]) -> list[int]:
    """The nodes of one cycle of waits, among those that never start; the lowest comes first."""
    edges = zip(nodes.before.tolist(), nodes.after.tolist(), strict=True)
    # Of those that a node waits for, the first that never starts.
    waits = {node: before for before, node in reversed([*edges]) if missing[before]}
    node = next(node for node, count in enumerate(missing) if count)
    path: dict[int, None] = {}
    while node not in path:
        path[node] = None
        node = waits[node]
    cycle = [*path][[*path].index(node) :]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def _describe(ops: ScheduledOps, needs: Needs, node: int) -> str:
    """How an error names a node."""
    if node < len(ops.rank):
        return describe_op(actions_of(ops)[node], int(ops.rank[node]))
    send = node - len(ops.rank)
    tensor = "gradient" if needs.backward[send] else "activation"
    return (
        f"the send_recv of the {tensor} of stage {needs.stage[send]}, microbatch "
        f"{needs.microbatch[send]} from rank {ops.rank[needs.producer[send]]} to rank "
        f"{ops.rank[needs.consumer[send]]}"
    )


def _asynchronous(ops: ScheduledOps, needs: Needs) -> _Nodes:
    """The graph in which send_recvs start at once and occupy no rank."""
    followers = 1 + np.flatnonzero(ops.rank[1:] == ops.rank[:-1])
    transfers = len(ops.rank) + np.arange(len(needs.producer))
    return _Nodes(
        np.concatenate([followers - 1, needs.producer, transfers]),
        np.concatenate([followers, transfers, needs.consumer]),
        [list(span[-1:]) for span in ops.orders],
    )


def _blocking(ops: ScheduledOps, needs: Needs) -> _Nodes:
    """The graph in which a send_recv is a rendezvous that blocks both ranks.

    A rank is a sequence of compute ops and batches of transfers. Each item waits for the whole item
    before it; a transfer waits on both of its ranks.
    """
    _check(ops)
    phase = ops.phase.tolist()
    sends = [[] for _ in phase]
    receives = [[] for _ in phase]
    ends = zip(needs.producer.tolist(), needs.consumer.tolist(), strict=True)
    for node, (producer, consumer) in enumerate(ends, len(phase)):
        sends[producer].append(node)
        receives[consumer].append(node)
    waits: list[tuple[int, int]] = []

    # The nodes of a batch wait for the last nodes of the rank, and then become its last nodes.
    def follow(batch: list[int], done: list[int]) -> list[int]:
        waits.extend((earlier, node) for node in batch for earlier in done)
        return batch or done

    last = []
    for span in ops.orders:
        done: list[int] = []
        for op in span:
            sent = sends[op - 1] if op > span.start else []
            if op > span.start and phase[op - 1] != phase[op]:
                done = follow(sent + receives[op], done)
            else:
                done = follow(receives[op], follow(sent, done))
            done = follow([op], done)
        last.append(follow(sends[span[-1]], done) if span else done)
    before, after = np.array(waits, np.int64).reshape(-1, 2).T
    return _Nodes(before, after, last)


def _check(ops: ScheduledOps) -> None:
    for rank, span in enumerate(ops.orders):
        stages = np.unique(ops.stage[span.start : span.stop]).tolist()
        phases = sorted({*ops.phase[span.start : span.stop].tolist()} - {"F", "B"})
        if len(stages) > 1 or phases:
            has = f"stages {stages}" if len(stages) > 1 else f"ops of phase {phases}"
            raise ValueError(
                "Blocking send_recv is only for schedules with one stage per rank and whole "
                f"backwards, such as 1F1B and GPipe, but rank {rank} runs {has}; use "
                "`blocking=False`."
            )
