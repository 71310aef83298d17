from typing import NamedTuple

from ._ops import Ops


class Transfer(NamedTuple):
    """A send_recv, of the output of a stage for one microbatch, from a rank to its peer."""

    stage: int
    microbatch: int
    rank: int
    peer: int
    backward: bool


class Nodes(NamedTuple):
    """A graph before it is numbered: nodes are the compute ops, then the transfers."""

    transfers: list[Transfer]
    waits: list[list[int]]
    last: list[list[int]]


def find_transfers(ops: Ops) -> tuple[list[Transfer], list[tuple[int, int]]]:
    """All transfers, and for each of them the op that makes its tensor and the op that needs it."""
    transfers = []
    ends = []
    for consumer, needs in enumerate(ops.needs):
        for producer, stage, microbatch, backward in needs:
            rank, peer = ops.ranks[producer], ops.ranks[consumer]
            transfers.append(Transfer(stage, microbatch, rank, peer, backward))
            ends.append((producer, consumer))
    return transfers, ends


def asynchronous_nodes(ops: Ops) -> Nodes:
    """The graph in which send_recvs start at once and occupy no rank."""
    transfers, ends = find_transfers(ops)
    waits = [[op - 1] for op in range(len(ops.actions))]
    for span in ops.orders:
        if span:
            waits[span[0]] = []
    for node, (producer, consumer) in enumerate(ends, len(ops.actions)):
        waits.append([producer])
        waits[consumer].append(node)
    return Nodes(transfers, waits, [list(span[-1:]) for span in ops.orders])
