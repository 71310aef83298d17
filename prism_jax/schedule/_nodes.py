from typing import NamedTuple

import numpy as np

from ._needs import Needs
from ._ops import Ops


class Nodes(NamedTuple):
    """A graph before it is numbered: nodes are the compute ops, then the send_recv of each need.

    Node `after[i]` waits for node `before[i]`.
    """

    before: np.ndarray
    after: np.ndarray
    last: list[list[int]]


def asynchronous_nodes(ops: Ops, needs: Needs) -> Nodes:
    """The graph in which send_recvs start at once and occupy no rank."""
    followers = 1 + np.flatnonzero(ops.rank[1:] == ops.rank[:-1])
    transfers = len(ops.rank) + np.arange(len(needs.producer))
    return Nodes(
        np.concatenate([followers - 1, needs.producer, transfers]),
        np.concatenate([followers, transfers, needs.consumer]),
        [list(span[-1:]) for span in ops.orders],
    )
