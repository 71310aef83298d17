"""Overlapped pairs of a forward and a backward of two microbatches: each computes while tokens of
the other are exchanged with experts.

As DualPipe pairs them (DeepSeek-V3, arXiv:2412.19437, section 3.2.1 and figure 4), and
Megatron-Core with `--overlap-moe-expert-parallel-comm`
(megatron/core/pipeline_parallel/combined_1f1b.py). For each layer:

    compute      attention F | experts B  | experts F  | attention B
    exchanges    combine B   | dispatch F | dispatch B | combine F

An op of one stream waits for the op before it in the stream, and for the op that computes its
tokens, which is in the other stream, one column before. So both streams meet after each column, and
a column takes as long as the longer of its two ops. The gradients of weights are computed with
those of the inputs.
"""

import functools as ft
import itertools as it
from collections import Counter
from collections.abc import Iterable

import msgspec

from ._architecture import Parts, recomputed
from ._block import Block, Branches, Kernel, Ordered, Passes, Segment
from ._costs import Costs
from ._layer import backward_part, forward_part, launched, launches
from ._parts import block
from ._sharded import beside_layers
from ._split import Stages


# How much longer the host launches a pair than its two parts: each layer is cut into the nodes of a
# schedule, which run on two streams. Chosen with three steps without CUDA graphs whose GPUs would
# be done in half to two thirds of the time: Qwen3-235B on 256 H100 with DeepEP (Megatron-Bridge
# 26.02.01), on 64 B200, and on H100 (MoE-ModelZoo).
_IN_PAIRS = 1.4


def passes_of(costs: Costs, stages: Stages) -> Passes | None:
    """The stages of a job in order; `None` if no stage has exchanges, or if its layers already
    overlap with the collectives of parameters.
    """
    if costs.layout.ep == 1 or beside_layers(costs.training):
        return None

    @ft.cache
    def forward(parts: Parts) -> Ordered:
        return tuple((tuple(forward_part(costs, part)), count) for part, count in parts)

    @ft.cache
    def backward(parts: Parts) -> Ordered:
        found = recomputed(parts, costs.training)[::-1]
        return tuple(
            (tuple(backward_part(costs, one.part, again=one.again)), one.count) for one in found
        )

    def launched_of(parts: Parts, *, back: bool) -> float:
        found = recomputed(parts, costs.training, back=back)
        counts = ((one, one.count * (1 + (back and one.again))) for one in found)
        return _IN_PAIRS * sum(count * launches(costs, one.part) for one, count in counts)

    return Passes(
        tuple(map(forward, stages.parts)),
        tuple(map(backward, stages.parts)),
        costs.exchange_contention,
        (
            tuple(launched_of(parts, back=False) for parts in stages.parts),
            tuple(launched_of(parts, back=True) for parts in stages.parts),
        ),
    )


def pair(passes: Passes, forward: int, backward: int) -> Block | None:
    """The block of a forward of one stage and a backward of the same or another stage; `None` if
    one of them has no exchanges. If one has more exchanges than the other, these are exposed.
    """
    rows = [list(_flat(passes.forward[forward])), list(_flat(passes.backward[backward]))]
    places = [[i for i, one in enumerate(row) if _exchange(one)] for row in rows]
    count = min(map(len, places))
    if count == 0:
        return None
    (ours, our_rest), (theirs, their_rest) = (
        _cut(row, found[:count]) for row, found in zip(rows, places, strict=True)
    )
    # Up to the first exchange that no exchange of the forward overlaps.
    more = next((i for i, one in enumerate(their_rest) if _exchange(one)), len(their_rest))
    after = [*(compute for compute, _ in theirs[1:]), their_rest[:more]]
    found = list(theirs[0][0])
    for (mine, sent), (_, got), its in zip(ours, theirs, after, strict=True):
        found.append(_column(mine, got, passes.contention))
        found.append(_column(its, sent, passes.contention))
    both = _joined([*found, *our_rest, *their_rest[more:]])
    seconds = passes.launches[0][forward] + passes.launches[1][backward]
    return block([(launched(both, seconds), 1)])


def _column(compute: list[Segment], exchange: Kernel, contention: tuple[float, float]) -> Segment:
    """Compute that overlaps with an exchange, after which all meet."""
    within = block([(_joined(compute), 1)])
    return Segment((), None, (Branches((), (((exchange, 1),),), contention, within),))


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    """Segments in order, in which compute without a wait is merged into the segment after it:
    members are then as late as the slowest in both together, not as the slowest in each.
    """
    found: list[Segment] = []
    loose: Counter[Kernel] = Counter()
    for one in segments:
        if loose and any(branches.within for branches in one.branches):
            found.append(Segment(tuple(loose.items())))
            loose.clear()
        for kernel, count in one.kernels:
            loose[kernel] += count
        if one.collective or one.branches or one.members:
            found.append(msgspec.structs.replace(one, kernels=tuple(loose.items())))
            loose.clear()
    return [*found, Segment(tuple(loose.items()))]


def _flat(ordered: Ordered) -> Iterable[Segment]:
    return it.chain.from_iterable(segments * count for segments, count in ordered)


def _exchange(one: Segment) -> bool:
    """Whether a segment ends with an exchange of tokens with experts."""
    closing = one.collective
    return closing is not None and (closing.kind, closing.group) == ("all_to_all", "ep")


def _cut(
    row: list[Segment], places: list[int]
) -> tuple[list[tuple[list[Segment], Kernel]], list[Segment]]:
    """The segments up to and including each exchange, and those after the last exchange."""
    parts, start = [], 0
    for place in places:
        last = row[place]
        assert last.collective is not None
        parts.append(
            ([*row[start:place], msgspec.structs.replace(last, collective=None)], last.collective)
        )
        start = place + 1
    return parts, row[start:]
