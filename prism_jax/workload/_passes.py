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
from collections import Counter
from collections.abc import Iterable

import msgspec

from ._architecture import Parts, recomputed
from ._block import Block, Branches, Kernel, Ordered, Passes, Segment, Segments
from ._costs import Costs
from ._parts import block
from ._split import Stages
from ._units import backward_part, forward_part, launched, launches, overlaps_layers


# How much longer the host launches a pair than its two parts: each layer is cut into the nodes of a
# schedule, which run on two streams. Chosen with three steps without CUDA graphs whose GPUs would
# be done in half to two thirds of the time: Qwen3-235B on 256 H100 with DeepEP (Megatron-Bridge
# 26.02.01), on 64 B200, and on H100 (MoE-ModelZoo).
_IN_PAIRS = 1.4


def passes_of(costs: Costs, stages: Stages) -> Passes | None:
    """The stages of a job in order; `None` if no stage has exchanges, or if its layers already
    overlap with the collectives of parameters, or with copies to the host.
    """
    training = costs.training
    copies = overlaps_layers(training) or "activations" in training.offload
    if costs.layout.ep == 1 or training.forward_only or copies:
        return None

    @ft.cache
    def in_order(parts: Parts, back: bool) -> tuple[Ordered, float]:
        """The segments of a stage, and how long the host takes to launch them."""
        found: list[tuple[tuple[Segment, ...], int]] = []
        seconds = 0.0
        for part, count, again in recomputed(parts, training, back=back):
            both = backward_part(costs, part, again) if back else forward_part(costs, part)
            found.append((tuple(both), count))
            seconds += count * (1 + (back and again)) * launches(costs, part)
        return tuple(found[::-1] if back else found), _IN_PAIRS * seconds

    forward, backward = (
        tuple(in_order(parts, back) for parts in stages.parts) for back in (False, True)
    )
    return Passes(forward, backward, costs.exchange_contention)


def pair(passes: Passes, forward: int, backward: int) -> Block | None:
    """The block of a forward of one stage and a backward of the same or another stage; `None` if
    one of them has no exchanges. If one has more exchanges than the other, these are exposed.
    """
    both = passes.forward[forward], passes.backward[backward]
    rows = [[one for segments, n in ordered for one in segments * n] for ordered, _ in both]
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
    joined = _joined([*found, *our_rest, *their_rest[more:]])
    seconds = both[0][1] + both[1][1]
    return block([(launched(joined, seconds), 1)])


def _column(compute: Segments, exchange: Kernel, contention: tuple[float, float]) -> Segment:
    """Compute that overlaps with an exchange, after which all meet."""
    within = block([(_joined(compute), 1)])
    return Segment((), None, (Branches((), (((exchange, 1),),), contention, within),))


def _joined(segments: Iterable[Segment]) -> Segments:
    """Segments in order, in which compute without a wait is merged into the segment after it:
    members are then as late as the slowest in both together, not as the slowest in each.
    """
    found: Segments = []
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


def _exchange(one: Segment) -> bool:
    """Whether a segment ends with an exchange of tokens with experts."""
    closing = one.collective
    return closing is not None and (closing.kind, closing.group) == ("all_to_all", "ep")


def _cut(row: Segments, places: list[int]) -> tuple[list[tuple[Segments, Kernel]], Segments]:
    """The segments up to and including each exchange, and those after the last exchange."""
    parts, start = [], 0
    for place in places:
        last = row[place]
        assert last.collective is not None
        before = [*row[start:place], msgspec.structs.replace(last, collective=None)]
        parts.append((before, last.collective))
        start = place + 1
    return parts, row[start:]
