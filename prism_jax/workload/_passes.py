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
from ._parts import block, closes, segment, until_all
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
        runs: list[tuple[tuple[Segment, ...], int]] = []
        seconds = 0.0
        for part, count, again in recomputed(parts, training, back=back):
            of_part = backward_part(costs, part, again) if back else forward_part(costs, part)
            runs.append((tuple(of_part), count))
            seconds += count * (1 + (back and again)) * launches(costs, part)
        return tuple(runs[::-1] if back else runs), _IN_PAIRS * seconds

    forward, backward = (
        tuple(in_order(parts, back) for parts in stages.parts) for back in (False, True)
    )
    return Passes(forward, backward, costs.exchange_contention)


def pair(passes: Passes, forward: int, backward: int) -> Block | None:
    """The block of a forward of one stage and a backward of the same or another stage; `None` if
    one of them has no exchanges. If one has more exchanges than the other, these are exposed.
    """
    ordered = passes.forward[forward], passes.backward[backward]
    rows = [[part for segments, n in parts for part in segments * n] for parts, _ in ordered]
    places = [[i for i, part in enumerate(row) if _exchange(part)] for row in rows]
    count = min(map(len, places))
    if count == 0:
        return None
    (ours, our_end), (theirs, their_end) = (
        _cut(row, exchanges[:count]) for row, exchanges in zip(rows, places, strict=True)
    )
    # Up to the first exchange that no exchange of the forward overlaps.
    num_before = next((i for i, part in enumerate(their_end) if _exchange(part)), len(their_end))
    last = segment([], members=rows[1][places[1][0]].members)
    after = [*(compute for compute, _ in theirs[1:]), [*their_end[:num_before], last]]
    # What follows the last exchange waits for the first one of the next pair.
    *exposed, end = _joined([*our_end, *their_end[num_before:]])
    columns = _until_all([end, *theirs[0][0]])
    for (our_compute, sent), (_, got), compute in zip(ours, theirs, after, strict=True):
        columns.append(_column(our_compute, got, passes.contention))
        columns.append(_column(compute, sent, passes.contention))
    seconds = sum(host for _, host in ordered)
    return block([(launched([*columns, *exposed], seconds), 1)])


def _column(compute: Segments, exchange: Kernel, contention: tuple[float, float]) -> Segment:
    """Compute that overlaps with an exchange, after which all meet."""
    within = block([(_until_all(compute), 1)])
    return Segment((), None, (Branches((), (((exchange, 1),),), contention, within),))


def _until_all(compute: Segments) -> Segments:
    """Compute at whose end all ranks of an exchange wait, those of smaller groups not before."""
    *before, last = compute
    return until_all([(before, 1)], last)


def _joined(segments: Iterable[Segment]) -> Segments:
    """Segments in order, in which compute without a wait is merged into the segment after it:
    members are then as late as the slowest in both together, not as the slowest in each.
    """
    closed: Segments = []
    loose: Counter[Kernel] = Counter()
    for part in segments:
        for kernel, count in part.kernels:
            loose[kernel] += count
        if closes(part):
            closed.append(msgspec.structs.replace(part, kernels=tuple(loose.items())))
            loose.clear()
    return [*closed, Segment(tuple(loose.items()))]


def _exchange(part: Segment) -> bool:
    """Whether a segment ends with an exchange of tokens with experts."""
    closing = part.collective
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
