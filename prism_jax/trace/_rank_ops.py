"""The ops of one rank, from its named ranges, on the clock of the device; and how far the clocks of
ranks are apart, from collectives, which all ranks leave together.
"""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from ._ranges import RangeNames, ops_of_pattern
from ._spans import Kind, Message, RankOp, RankTrace, Spans
from ._trace import BACKWARD_COMPUTE, COMPUTE, FORWARD_COMPUTE, LOAD_DATA, OPTIMIZER, TRANSFERS


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
            mine += ops_of_pattern(spans, start, end, mine, num_microbatches)
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


# The largest difference, in scatters of two ends, that the order of leaving can explain.
_BY_CHANCE = 2.0
# All members leave these at the same time.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The offsets between the clocks of ranks.

    **Attributes:**

    - `offsets`: for each rank, the nanoseconds to add to its times.
    - `seen`: for each rank, by how much its clock was found to be ahead of that of the first rank.
    - `scatter_ns`: the robust standard deviation of the remaining differences, over all
        collectives.
    - `matched`: how many collectives were matched.
    - `unknown`: ranks that have no collective in common with the others.
    """

    offsets: dict[int, int]
    seen: dict[int, int]
    scatter_ns: float
    matched: int
    unknown: tuple[int, ...]


def set_clocks(ranks: Sequence[RankOps]) -> Clocks:
    """Finds the offsets between clocks: the median difference between the ends of the collectives
    that two ranks of a job ran together. A difference within twice their scatter is not corrected,
    because it may be the order in which ranks leave; neither is a difference between two ranks of
    one host.
    """
    first = min(ranks, key=lambda r: r.rank)
    seen, offsets, scatters = {first.rank: 0}, {first.rank: 0}, []
    matched: set = set()
    waiting = [first]
    while waiting:
        one = waiting.pop()
        for other in ranks:
            both = _together(one, other)
            alike = one.host == other.host != ""
            if other.rank in seen or not (both or alike):
                continue
            apart = np.array([other.collectives[k][1] - one.collectives[k][1] for k in both] or [0])
            median = float(np.median(apart))
            scatter = 1.4826 * float(np.median(np.abs(apart - median)))
            is_apart = not alike and abs(median) > _BY_CHANCE * scatter
            seen[other.rank] = seen[one.rank] + round(median)
            offsets[other.rank] = offsets[one.rank] - (round(median) if is_apart else 0)
            scatters.append(scatter)
            matched.update(both)
            waiting.append(other)
    unknown = tuple(sorted(r.rank for r in ranks if r.rank not in seen))
    offsets |= dict.fromkeys(unknown, 0)
    return Clocks(offsets, seen, max(scatters, default=0.0), len(matched), unknown)


def _together(one: RankOps, other: RankOps) -> list:
    """The collectives that both ranks ran together. If groups are not known, these are the kinds
    that both ran equally often, because others may belong to different groups.
    """
    both = [k for k in other.collectives if k in one.collectives and k[0].name in _TOGETHER]
    calls = [collections.Counter(message for message, _ in r.collectives) for r in (one, other)]
    return [k for k in both if k[0].group or calls[0][k[0]] == calls[1][k[0]]]
