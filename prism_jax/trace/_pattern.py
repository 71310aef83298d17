"""Finds forwards and backwards of microbatches without named ranges, from the repeated pattern of
host operators in a step.
"""

import dataclasses
import itertools as it
from collections.abc import Sequence

import numpy as np

from ._spans import BACKWARD, HOST_OP, MESSAGE, WAITING, RankOp, Spans
from ._trace import BACKWARD_COMPUTE, FORWARD_COMPUTE


# A run with less than this share of a microbatch's operators is not a microbatch.
_NOISE = 0.5
# A cut between two microbatches is moved to an exchange within this distance, in microbatches. Any
# operators before an exchange at its start, or after one at its end, are as few.
_NEAR, _EDGE = 0.4, 0.2


@dataclasses.dataclass
class _Run:
    """Consecutive operators of one kind; `cuts` are the positions among them of exchanges of the
    host.
    """

    op: str
    spans: list[tuple[int, int]]
    cuts: list[int]

    def inner(self, low: int, high: int) -> tuple[int, int]:
        """A microbatch's operators, without those that an exchange separates from most of them."""
        edge = _EDGE * (high - low)
        first = max((cut for cut in self.cuts if low < cut <= low + edge), default=low)
        return first, min((cut for cut in self.cuts if high - edge <= cut < high), default=high)


def ops_of_pattern(
    spans: Spans, number: int, start: int, end: int, known: Sequence[RankOp], num_microbatches: int
) -> list[RankOp]:
    """The forwards and backwards of the step `number`; empty if they cannot be found.

    Autograd nodes are backwards; all other operators of the host, except those within the `known`
    ranges, are forwards. Microbatches have about equally many operators, so long runs of one kind
    belong to several of the `num_microbatches` that the rank runs in a step, on all of its stages.
    """
    found: list[RankOp] = []
    runs = _runs(spans, start, end, known)
    for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE):
        total = sum(len(run.spans) for run in runs if run.op == op)
        runs = _without_noise(runs, op, _NOISE * total / num_microbatches)
    for op in (FORWARD_COMPUTE, BACKWARD_COMPUTE):
        mine = [run for run in runs if run.op == op]
        each = sum(len(run.spans) for run in mine) / num_microbatches
        numbers = [round(len(run.spans) / each) for run in mine]
        if sum(numbers) != num_microbatches or 0 in numbers:
            return []
        for run, pieces in zip(mine, numbers, strict=True):
            for low, high in it.starmap(run.inner, it.pairwise(_cuts(run, pieces))):
                first, last = run.spans[low][0], max(e for _, e in run.spans[low:high])
                found.append(RankOp(number, op, -1, -1, first, last))
    return found


def _runs(spans: Spans, start: int, end: int, known: Sequence[RankOp]) -> list[_Run]:
    waits = np.array([name.startswith(WAITING) for name in spans.names] or [False])
    kinds = np.isin(spans.kind, (HOST_OP, BACKWARD, MESSAGE))
    mine = spans[kinds & (spans.start >= start) & (spans.start < end)]
    outermost: dict[int, int] = {}
    runs: list[_Run] = []
    others = sorted((op.start, op.end) for op in known)
    for i in np.lexsort((-mine.end, mine.start)).tolist():
        low, high, lane = int(mine.start[i]), int(mine.end[i]), int(mine.lane[i])
        if mine.kind[i] == MESSAGE or waits[mine.name[i]]:  # It may last while other ops run.
            if runs:
                runs[-1].cuts.append(len(runs[-1].spans))
            continue
        inside = high <= outermost.get(lane, low - 1)
        outermost[lane] = max(high, outermost.get(lane, low))
        if inside or any(a <= low < b for a, b in others):
            continue
        op = BACKWARD_COMPUTE if mine.kind[i] == BACKWARD else FORWARD_COMPUTE
        if not runs or runs[-1].op != op:
            runs.append(_Run(op, [], []))
        runs[-1].spans.append((low, high))
    return runs


def _without_noise(runs: list[_Run], op: str, fewest: float) -> list[_Run]:
    """The runs without short runs of a kind; the runs around these are merged."""
    kept: list[_Run] = []
    for run in runs:
        if run.op == op and len(run.spans) < fewest:
            continue
        if kept and kept[-1].op == run.op:
            before = len(kept[-1].spans)
            spans, cuts = kept[-1].spans + run.spans, [before + cut for cut in run.cuts]
            kept[-1] = _Run(run.op, spans, [*kept[-1].cuts, before, *cuts])
        else:
            kept.append(run)
    return kept


def _cuts(run: _Run, pieces: int) -> list[int]:
    """Where the microbatches of a run begin and end."""
    each = len(run.spans) / pieces
    cuts = [0]
    for i in range(1, pieces):
        near = [cut for cut in run.cuts if abs(cut - i * each) <= _NEAR * each]
        cuts.append(min(near, key=lambda cut: abs(cut - i * each)) if near else round(i * each))
    return [*cuts, len(run.spans)]
