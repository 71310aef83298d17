import dataclasses
import functools as ft
import itertools as it

import numpy as np
from jaxtyping import Bool, Int, Shaped

from .._ragged import group
from ._base import AbstractSchedule
from ._blocking import blocking_nodes
from ._needs import Needs, find_needs
from ._nodes import asynchronous_nodes
from ._ops import Ops, action, ops_of
from ._token import SEND_RECV
from ._topological import topological_order


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


# The costs of a schedule are often evaluated many times over.
@ft.lru_cache(maxsize=4)
def _op_graph(schedule: AbstractSchedule, blocking: bool) -> OpGraph:
    ops = ops_of(schedule)
    needs = find_needs(ops, schedule.stage_to_rank, schedule.chain_starts)
    nodes = (blocking_nodes if blocking else asynchronous_nodes)(ops, needs)
    num_ops, num_sends = len(ops.rank), len(needs.producer)
    describe = ft.partial(_describe, ops, needs)
    order = np.array(topological_order(nodes, num_ops + num_sends, describe), np.int64)
    new = np.empty(len(order), np.int64)
    new[order] = np.arange(len(order))
    before = group(new[nodes.after], new[nodes.before], len(order))
    others, starts = tuple(before.values.tolist()), before.starts.tolist()
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
        predecessors=tuple(others[a:b] for a, b in it.pairwise(starts)),
        orders=tuple(tuple(new[op] for op in span) for span in ops.orders),
        last=tuple(tuple(new[node] for node in last) for last in nodes.last),
    )


def _describe(ops: Ops, needs: Needs, node: int) -> str:
    """How an error names a node."""
    if node < len(ops.rank):
        one = action(ops, node)
        return (
            f"`{one.token}` (stage {one.stage}, microbatch {one.microbatch}) on rank "
            f"{ops.rank[node]}"
        )
    send = node - len(ops.rank)
    what = "gradient" if needs.backward[send] else "activation"
    return (
        f"the send_recv of the {what} of stage {needs.stage[send]}, microbatch "
        f"{needs.microbatch[send]} from rank {ops.rank[needs.producer[send]]} to rank "
        f"{ops.rank[needs.consumer[send]]}"
    )
