"""The ops of one rank, from its named ranges, on the clock of the device."""

import collections
import dataclasses
import itertools as it
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from ._ranges import Reader, ops_of_pattern
from ._spans import (
    BACKWARD,
    HOST_OP,
    KERNEL,
    LAUNCH,
    MESSAGE,
    RANGE,
    WAITING,
    Message,
    RankOp,
    RankTrace,
    Spans,
)
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
    """

    rank: int
    host: str
    steps: Int[np.ndarray, "steps 3"]
    ops: tuple[RankOp, ...]
    collectives: dict[tuple[Message, int], tuple[int, int]]
    by_pattern: bool = False


def rank_ops(trace: RankTrace, reader: Reader, num_microbatches: int | None = None) -> RankOps:
    """The ops of one rank.

    The range of an op is on the host. The op lasts from the first to the last kernel that was
    launched in the range, except collectives, because they wait. Without a device, operators of the
    host are used instead of kernels. A backward without a range is what autograd runs after each
    forward. If compute has no ranges at all, it is found by its pattern.

    **Arguments:**

    - `trace`: the trace of one rank.
    - `reader`: the reader of names.
    - `num_microbatches`: how many microbatches a rank runs in a step, on all of its stages; without
        it, no pattern is looked for.
    """
    spans = trace.spans
    ranges = _named(spans, reader)
    steps = _steps(spans, reader, ranges)
    device = spans.kind == KERNEL
    every = _Kernels(spans, spans[device])
    computing = _Kernels(spans, spans[device & (spans.message < 0)])
    nodes = spans[spans.kind == BACKWARD]
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
    return RankOps(rank, trace.host, steps, tuple(ops), _collectives(spans), by_pattern)


def _named(spans: Spans, reader: Reader) -> list[RankOp]:
    """The outermost ranges of each kind, in the order of their starts."""
    found = []
    of_name = [reader.op(name) for name in spans.names]
    known = np.array([named is not None for named in of_name] or [False])
    chosen = spans[(spans.kind == RANGE) & known[spans.name]]
    last: dict[str, int] = {}
    for i in np.lexsort((-chosen.end, chosen.start)).tolist():
        ops, microbatch, stage = of_name[chosen.name[i]] or ("", -1, -1)
        start, end = int(chosen.start[i]), int(chosen.end[i])
        if end > last.get(ops, start):
            last[ops] = end
            found += [RankOp(-1, op, microbatch, stage, start, end) for op in ops.split("+")]
    return found


def _steps(spans: Spans, reader: Reader, ranges: list[RankOp]) -> Int[np.ndarray, "steps 3"]:
    """The number, start and end of each step: from ranges of steps, or else up to the end of each
    optimizer.
    """
    found = {}
    numbers = [reader.step(name) for name in spans.names]
    for i in np.flatnonzero(spans.kind == RANGE).tolist():
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
            launches = spans[spans.kind == LAUNCH]
            order = np.argsort(launches.link, kind="stable")
            links = launches.link[order]
            place = np.minimum(np.searchsorted(links, device.link), max(len(links) - 1, 0))
            known = (links[place] == device.link) if len(links) else np.zeros(len(device), bool)
            device = device[known]
            launched = launches.start[order][place[known]] if len(links) else device.start
        else:
            computes = np.array([not n.startswith(WAITING) for n in spans.names] or [False])
            device = spans[(spans.kind == HOST_OP) & computes[spans.name]]
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
    mine = spans[(spans.kind == KERNEL) & (spans.message >= 0)]
    if not len(mine):
        mine = spans[spans.kind == MESSAGE]
    for i in np.argsort(mine.start, kind="stable").tolist():
        message = mine.messages[mine.message[i]]
        number = next(seen[message])
        sequence = int(mine.sequence[i])
        key = (message, sequence if sequence >= 0 else number)
        found[key] = (int(mine.start[i]), int(mine.end[i]))
    return found
