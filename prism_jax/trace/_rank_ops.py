"""The ops of one rank on the clock of its device: from its named ranges or, if microbatches have no
names, from the repeated pattern of host operators.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from ._spans import Kind, Message, RankOp, RankTrace, Spans
from ._trace import (
    BACKWARD_COMPUTE,
    COMPUTE,
    FORWARD_COMPUTE,
    LOAD_DATA,
    OPTIMIZER,
    TRANSFERS,
    RangeNames,
)


@dataclasses.dataclass(frozen=True)
class RankOps:
    """The data of one rank that is kept after its spans are freed.

    **Attributes:**

    - `rank`, `host`: its number, and the host on which it ran, if that is known.
    - `steps`: `(steps, 3)`, the number, start and end of each step.
    - `ops`: its ops in the order of their starts.
    - `collectives`: for each message with its sequence number, `(calls, 2)` starts and ends.
    - `by_pattern`: whether its compute has no named ranges and was found by its pattern.
    - `notes`, `cut`: warnings for readers, and whether its file ends early.
    """

    rank: int
    host: str
    steps: Int[np.ndarray, "steps 3"]
    ops: tuple[RankOp, ...]
    collectives: dict[tuple[Message, int], tuple[int, int]]
    by_pattern: bool
    notes: tuple[str, ...]
    cut: bool


def rank_ops(trace: RankTrace, names: RangeNames, num_microbatches: int | None = None) -> RankOps:
    """The ops of one rank.

    The range of an op is on the host. The op lasts from the first to the last kernel that was
    launched in the range, except collectives, because they wait. Without a device, operators of the
    host are used instead of kernels. A backward without a range is what autograd runs after each
    forward. If compute has no ranges at all, it is found by its pattern.

    **Arguments:**

    - `trace`: the trace of one rank.
    - `names`: the meaning of the names of ranges.
    - `num_microbatches`: how many microbatches a rank runs in a step, on all of its stages; without
        it, no pattern is looked for.
    """
    spans = trace.spans
    ranges = _named(spans, names)
    steps = _steps(spans, names, ranges)
    device = spans.kind == Kind.KERNEL
    every = _Kernels(spans, spans[device])
    computing = _Kernels(spans, spans[device & (spans.message < 0)])
    nodes = spans[spans.kind == Kind.BACKWARD]
    ops: list[RankOp] = []
    by_pattern = False
    for number, start, end in steps.tolist():
        before = max((op.end for op in ops), default=start)  # A device lags behind the host.
        found = []
        mine = [r for r in ranges if start <= r.start < end]
        if num_microbatches and not any(r.op in COMPUTE for r in mine):
            mine += _ops_of_pattern(spans, start, end, mine, num_microbatches)
            by_pattern = True
        if not any(r.op.startswith("backward") for r in mine):
            mine += _unnamed_backwards(mine, nodes, end)
        calls = collections.defaultdict(it.count)  # In the order of time if names have no numbers.
        for r in sorted((_without_waits(r, nodes) for r in mine), key=lambda r: r.start):
            call = next(calls[r.op])
            if r.op in TRANSFERS and not device.any():
                continue  # The host only requests the op in this range.
            times = (computing if r.op in _COMPUTING else every).times(r)
            if times is not None:
                microbatch = r.microbatch if r.microbatch >= 0 else call
                found.append(RankOp(number, r.op, microbatch, r.stage, *times))
        if found:
            begin = min(op.start for op in found)
            # At least a nanosecond, so that it comes first.
            start = min(max(start, before), begin - 1)
            ops += [*found, RankOp(number, LOAD_DATA, 0, -1, start, begin)]
    rank = trace.rank or 0
    notes = tuple(f"rank {rank}: {note}" for note in trace.notes)
    about = (_collectives(spans), by_pattern, notes, trace.cut)
    return RankOps(rank, trace.host, steps, tuple(ops), *about)


def _named(spans: Spans, names: RangeNames) -> list[RankOp]:
    """The outermost ranges of each kind, in the order of their starts."""
    found = []
    of_name = [names.op_of(name) for name in spans.names]
    chosen = spans[spans.kind == Kind.RANGE]
    last: dict[str, int] = {}
    for i in np.lexsort((-chosen.end, chosen.start)).tolist():
        if (named := of_name[chosen.name[i]]) is None:
            continue
        ops, microbatch, stage = named
        start, end = int(chosen.start[i]), int(chosen.end[i])
        if end > last.get(ops, start):
            last[ops] = end
            found += [RankOp(-1, op, microbatch, stage, start, end) for op in ops.split("+")]
    return found


def _steps(spans: Spans, names: RangeNames, ranges: list[RankOp]) -> Int[np.ndarray, "steps 3"]:
    """The number, start and end of each step: from ranges of steps, or else up to the end of each
    optimizer.
    """
    found = {}
    numbers = [names.step_of(name) for name in spans.names]
    for i in np.flatnonzero(spans.kind == Kind.RANGE).tolist():
        number = numbers[spans.name[i]]
        if number is not None:
            found.setdefault(number, (number, int(spans.start[i]), int(spans.end[i])))
    if not found:
        start = int(spans.start.min()) if len(spans) else 0
        for number, r in enumerate(r for r in ranges if r.op == OPTIMIZER):
            found[number] = (number, start, r.end)
            start = r.end
    return np.array(sorted(found.values()), np.int64).reshape(-1, 3)


def _unnamed_backwards(ranges: list[RankOp], nodes: Spans, step_end: int) -> Iterator[RankOp]:
    """The autograd nodes between a forward and the next op, as backwards."""
    forwards = [r for r in ranges if r.op == FORWARD_COMPUTE]
    ends = [forward.start for forward in forwards[1:]]
    for forward, until in zip(forwards, [*ends, step_end], strict=False):
        if times := nodes.extent((nodes.start >= forward.end) & (nodes.start < until)):
            yield dataclasses.replace(forward, op=BACKWARD_COMPUTE).at(times)


def _without_waits(r: RankOp, nodes: Spans) -> RankOp:
    """A backward up to the last compute of autograd; after that it waits for other replicas."""
    inside = (nodes.start >= r.start) & (nodes.end <= r.end) & (r.op == BACKWARD_COMPUTE)
    return r.at(nodes.extent(inside))


class _Kernels:
    """Kernels in the order in which they were launched."""

    def __init__(self, spans: Spans, device: Spans):
        if len(device):
            launches = spans[spans.kind == Kind.LAUNCH]
            launches = launches[np.argsort(launches.link, kind="stable")]
            device = device[np.isin(device.link, launches.link)]
            launched = launches.start[np.searchsorted(launches.link, device.link)]
        else:
            device = spans[(spans.kind == Kind.HOST_OP) & ~spans.waits()]
            launched = device.start
        order = np.argsort(launched, kind="stable")
        self.launched = launched[order]
        self.start, self.end = device.start[order], device.end[order]

    def times(self, r: RankOp) -> tuple[int, int] | None:
        """When an op runs on the clock of the device; `None` if it launched no kernels."""
        if not len(self.launched):
            return r.start, r.end
        low, high = np.searchsorted(self.launched, [r.start, r.end]).tolist()
        if low == high:
            return None
        return int(self.start[low:high].min()), int(self.end[low:high].max())


# Ops within which collectives are waits for other ranks; any other op is itself a collective.
_COMPUTING = (*COMPUTE, OPTIMIZER)


def _collectives(spans: Spans) -> dict[tuple[Message, int], tuple[int, int]]:
    """Collectives, identified by properties that all of their members know."""
    found = {}
    seen = collections.defaultdict(it.count)
    mine = spans[(spans.kind == Kind.KERNEL) & (spans.message >= 0)]
    if not len(mine):
        mine = spans[spans.kind == Kind.MESSAGE]
    for i in np.argsort(mine.start, kind="stable").tolist():
        message = mine.messages[mine.message[i]]
        number = next(seen[message])
        sequence = int(mine.sequence[i])
        key = (message, sequence if sequence >= 0 else number)
        found[key] = (int(mine.start[i]), int(mine.end[i]))
    return found


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


def _ops_of_pattern(
    spans: Spans, start: int, end: int, known: Sequence[RankOp], num_microbatches: int
) -> list[RankOp]:
    """The forwards and backwards of a step; empty if they cannot be found.

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
                found.append(RankOp(-1, op, -1, -1, first, last))
    return found


def _runs(spans: Spans, start: int, end: int, known: Sequence[RankOp]) -> list[_Run]:
    kinds = np.isin(spans.kind, (Kind.HOST_OP, Kind.BACKWARD, Kind.MESSAGE))
    mine = spans[kinds & (spans.start >= start) & (spans.start < end)]
    waits = mine.waits() | (mine.kind == Kind.MESSAGE)
    outermost: dict[int, int] = {}
    runs: list[_Run] = []
    others = sorted((op.start, op.end) for op in known)
    for i in np.lexsort((-mine.end, mine.start)).tolist():
        low, high, lane = int(mine.start[i]), int(mine.end[i]), int(mine.lane[i])
        if waits[i]:  # It may last while other ops run.
            if runs:
                runs[-1].cuts.append(len(runs[-1].spans))
            continue
        inside = high <= outermost.get(lane, low - 1)
        outermost[lane] = max(high, outermost.get(lane, low))
        if inside or any(a <= low < b for a, b in others):
            continue
        op = BACKWARD_COMPUTE if mine.kind[i] == Kind.BACKWARD else FORWARD_COMPUTE
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
