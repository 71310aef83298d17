import dataclasses
import functools as ft

import numpy as np
from jaxtyping import Bool, Int, Shaped

from ._base import AbstractSchedule
from ._blocking import blocking_nodes
from ._nodes import asynchronous_nodes
from ._ops import parse_orders
from ._token import SEND_RECV, Action
from ._topological import topological_order


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph:
    """The step of one replica as ops, and for each op the ops that it waits for.

    Ops are listed in a topological order: an op waits only for ops with smaller ids. It starts when
    the last of them has ended. What follows from other waits is left out, so an op waits for at
    most the op before it on its rank and the tensors that come from other ranks.

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
    - `last`: for each rank, the ops of which the latest end is the end of that rank. These are its
        last compute op or, where send_recvs block, its last batch of them.
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


def op_graph(schedule: AbstractSchedule, *, blocking: bool = False) -> OpGraph:
    """Builds the graph of a schedule's ops.

    **Arguments:**

    - `schedule`: any schedule.
    - `blocking`: by default a send_recv is asynchronous: it starts when its producer has ended, and
        occupies no rank. With `blocking=True` it is a rendezvous, as in Megatron-LM's 1F1B without
        interleaving: it starts when both ranks have come to it, and holds up both until all
        send_recvs of their batch have ended. What a rank sends and receives between a forward and a
        backward is one batch. This needs one stage per rank and whole backwards.

    **Returns:**

    An [`prism_jax.OpGraph`][].

    **Raises:**

    A `ValueError` that names rank, stage and microbatch where the orders deadlock.
    """
    return _op_graph(schedule, blocking)


# The costs of a schedule are often evaluated many times over.
@ft.lru_cache(maxsize=4)
def _op_graph(schedule: AbstractSchedule, blocking: bool) -> OpGraph:
    ops = parse_orders(schedule.orders(), schedule.stage_to_rank, schedule.chain_starts)
    nodes = (blocking_nodes if blocking else asynchronous_nodes)(ops)
    order = topological_order(nodes.waits, ft.partial(_describe, ops, nodes))
    new = [0] * len(order)
    for op, node in enumerate(order):
        new[node] = op
    actions = ops.actions + [
        Action(SEND_RECV, transfer.stage, transfer.microbatch) for transfer in nodes.transfers
    ]
    ranks = ops.ranks + [transfer.rank for transfer in nodes.transfers]
    peers = [-1] * len(ops.actions) + [transfer.peer for transfer in nodes.transfers]
    backward = [False] * len(ops.actions) + [transfer.backward for transfer in nodes.transfers]
    phase, stage, microbatch, other_stage, other_microbatch = zip(*actions, strict=True)
    return OpGraph(
        phase=_reorder(phase, order),
        stage=_reorder(stage, order),
        microbatch=_reorder(microbatch, order),
        rank=_reorder(ranks, order),
        peer=_reorder(peers, order),
        other_stage=_reorder(other_stage, order),
        other_microbatch=_reorder(other_microbatch, order),
        backward=_reorder(backward, order),
        predecessors=tuple(tuple(sorted(new[n] for n in nodes.waits[node])) for node in order),
        orders=tuple(tuple(new[op] for op in span) for span in ops.orders),
        last=tuple(tuple(new[node] for node in last) for last in nodes.last),
    )


def _reorder(values, order) -> np.ndarray:
    array = np.array(values)[order]
    array.setflags(write=False)
    return array


def _describe(ops, nodes, node: int) -> str:
    """How an error names a node."""
    if node < len(ops.actions):
        action = ops.actions[node]
        return (
            f"`{action.token}` (stage {action.stage}, microbatch {action.microbatch}) on rank "
            f"{ops.ranks[node]}"
        )
    transfer = nodes.transfers[node - len(ops.actions)]
    what = "gradient" if transfer.backward else "activation"
    return (
        f"the send_recv of the {what} of stage {transfer.stage}, microbatch "
        f"{transfer.microbatch} from rank {transfer.rank} to rank {transfer.peer}"
    )
