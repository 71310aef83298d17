"""The graph of a schedule's ops, and their kinds."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..schedule import SEND_RECV, OpGraph
from ..workload import Block, Segment, Workload, pair


class OpKind(NamedTuple):
    """Everything that decides the kernels of an op; see `OpGraph`."""

    phase: str
    stage: int
    other: int
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
    sends = {ends: ((Segment((), one), 1),) for ends, one in workload.send_recv.items()}
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
        apart = workload.forward[kind.stage] + workload.backward[kind.other]
        passes = workload.passes
        if passes is None:
            return apart
        alike = id(passes.forward[kind.stage]), id(passes.backward[kind.other])
        if alike not in pairs:
            beside = pair(passes, kind.stage, kind.other)
            pairs[alike] = apart if beside is None else beside
        return pairs[alike]

    return [of_kind(kind) for kind in kinds]
