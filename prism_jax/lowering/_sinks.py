"""Sinks: ops after whose ends all replicas can reduce gradients, and these reductions.

A pipeline rank runs its reductions one after the other, as their gradients become ready, overlapped
with the backwards that follow.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ..schedule import OVERLAPPED, OpGraph
from ..workload import Block, Reduction, Workload, block_mean, block_means


class Sink(NamedTuple):
    """Gradients that a pipeline rank reduces together.

    **Attributes:**

    - `rank`: the pipeline rank.
    - `ops`: the ops that must have ended before the reduction can start.
    - `reduction`: the collectives of the reduction.
    - `pieces`, `piece`: the pieces of the first op, and which of these must have ended; empty if
        the whole op must have ended.
    """

    rank: int
    ops: tuple[int, ...]
    reduction: Block = ()
    pieces: tuple[Block, ...] = ()
    piece: int = 0


def sinks_of(graph: OpGraph, workload: Workload) -> tuple[Sink, ...]:
    """The sinks of a graph: those of a rank in order of time; the last is the end of the rank."""
    turns = _turns(graph)
    sinks: list[Sink] = []
    for rank, reductions in enumerate(workload.reductions):
        of_ops: dict[tuple[int, ...], list[Reduction]] = {}
        for reduction in reductions:
            ends = [turns[stage] for stage in reduction.stages if stage in turns]
            of_turns = (
                zip(*ends, strict=True) if reduction.each_turn else [[end[-1] for end in ends]]
            )
            for ops in map(tuple, of_turns):
                of_ops.setdefault(ops, []).append(reduction)
        place = {op: i for i, op in enumerate(graph.orders[rank])}
        of_end = of_ops.pop((), [])
        in_time = sorted(of_ops, key=lambda ops: place.get(ops[0], -1))
        of_rank = [sink for ops in in_time for sink in _sinks(graph, rank, ops, of_ops[ops])]
        end = Sink(rank, graph.last[rank], _together(of_end))
        if of_rank and of_rank[-1].ops[0] == graph.orders[rank][-1]:
            before = of_rank.pop()
            # The last reduction of the rank ends no earlier than its last backward.
            first = before.ops[:1] if before.pieces else ()
            ops = tuple(dict.fromkeys((*first, *end.ops, *before.ops[1:])))
            end = before._replace(ops=ops, reduction=before.reduction + end.reduction)
        sinks += [*of_rank, end]
    return tuple(sinks)


# As many as the graphs that `op_graph` keeps and returns again.
@ft.lru_cache(maxsize=4)
def _turns(graph: OpGraph) -> dict[int, list[int]]:
    """For each stage, the last op of each of its rows of backwards, before its rank turns to
    another stage, in order.
    """
    turns: dict[int, list[int]] = {}
    phase, stage, other_stage = graph.phase, graph.stage, graph.other_stage
    for order in graph.orders:
        ops = np.array(order, int)
        makes = np.isin(phase[ops], ("B", "W", OVERLAPPED))
        ops = ops[makes]
        stages = np.where(phase[ops] == OVERLAPPED, other_stage[ops], stage[ops])
        ends = np.append(stages[1:] != stages[:-1], True)[: len(ops)]
        for turn, op in zip(stages[ends].tolist(), ops[ends].tolist(), strict=True):
            turns.setdefault(turn, []).append(op)
    return turns


def _together(reductions: Sequence[Reduction]) -> Block:
    if len(reductions) == 1:
        return reductions[0].kernels  # Most stages share it.
    return tuple(part for reduction in reductions for part in reduction.kernels)


def _sinks(
    graph: OpGraph, rank: int, ops: tuple[int, ...], reductions: Sequence[Reduction]
) -> list[Sink]:
    """The sinks of gradients that become ready in one op: several if it is a whole backward."""
    pieces = tuple(reduction.piece for reduction in reductions if reduction.piece is not None)
    cut = len(pieces) > 1 and len(ops) == 1 and graph.phase[list(ops)].tolist() == ["B"]
    if not cut:
        return [Sink(rank, ops, _together(reductions))]
    return [Sink(rank, ops, reduction.kernels, pieces, k) for k, reduction in enumerate(reductions)]


def cut_at_sinks(
    graph: OpGraph, blocks: Sequence[Block], sinks: Sequence[Sink]
) -> tuple[OpGraph, list[Block], tuple[Sink, ...]]:
    """The graph, the blocks of its ops and its sinks, with each piece of an op as an op of its own.
    The first piece waits for the ops that the op waits for; ops that wait for the op wait for the
    last piece.
    """
    pieces = {sink.ops[0]: sink.pieces for sink in sinks if sink.pieces}
    if not pieces:
        return graph, list(blocks), tuple(sinks)
    counts = np.array([len(pieces.get(op, "1")) for op in range(graph.num_ops)])
    ends = np.cumsum(counts) - 1
    starts = ends - counts + 1

    def to_ends(ops: Sequence[int]) -> tuple[int, ...]:
        return tuple(ends[list(ops)].tolist())

    before: list[tuple[int, ...]] = []
    of_pieces: list[Block] = []
    for op, (waits, block) in enumerate(zip(graph.predecessors, blocks, strict=True)):
        before.append(to_ends(waits))
        before += [(piece,) for piece in range(starts[op], ends[op])]
        of_pieces += pieces.get(op, (block,))
    names = [field.name for field in dataclasses.fields(graph)]
    columns = [name for name in names if isinstance(getattr(graph, name), np.ndarray)]
    cut = dataclasses.replace(
        graph,
        **{name: np.repeat(getattr(graph, name), counts) for name in columns},
        predecessors=tuple(before),
        orders=tuple(
            tuple(piece for op in order for piece in range(starts[op], ends[op] + 1))
            for order in graph.orders
        ),
        last=tuple(map(to_ends, graph.last)),
    )
    return cut, of_pieces, tuple(_moved(sink, starts, to_ends) for sink in sinks)


def _moved(sink: Sink, starts, to_ends) -> Sink:
    if not sink.pieces:
        return sink._replace(ops=to_ends(sink.ops))
    piece = int(starts[sink.ops[0]]) + sink.piece
    return Sink(sink.rank, (piece, *to_ends(sink.ops[1:])), sink.reduction)


def when_reduced(
    sinks: Sequence[Sink], ends: Float[np.ndarray, "sinks"], contention: float
) -> Float[np.ndarray, "ranks"]:
    """The time at which each rank has reduced its gradients, without variability, in seconds.
    `ends` are the ends of the ops of sinks.
    """
    reduced = np.zeros(1 + max(sink.rank for sink in sinks))
    means = block_means([sink.reduction for sink in sinks])
    # The sinks of one op share its pieces, of which there may be one for each layer.
    shared = {id(sink.pieces): sink.pieces for sink in sinks}
    remainders = {key: _from_each(pieces) for key, pieces in shared.items()}
    for rank in range(len(reduced)):
        of_rank = [i for i, sink in enumerate(sinks) if sink.rank == rank]
        before, total = 0.0, sum(means[i] for i in of_rank)
        for i in of_rank:
            sink = sinks[i]
            end = ends[i] - remainders[id(sink.pieces)][sink.piece + 1]
            reduced[rank] = max(reduced[rank], end + contention * before + (total - before))
            before += means[i]
    return reduced


def _from_each(pieces: Sequence[Block]) -> list[float]:
    """The latency of each piece together with all later ones; then two zeros, for no piece."""
    means = [*map(block_mean, pieces), 0.0, 0.0]
    return np.cumsum(means[::-1])[::-1].tolist()
