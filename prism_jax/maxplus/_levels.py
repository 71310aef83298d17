"""Topological levels of a graph of ops, and where the end of each op is kept while it is needed."""

import heapq
from collections.abc import Sequence

import equinox as eqx
import numpy as np

from .._misc import FrozenArray


class Levels(eqx.Module):
    """A graph of ops cut into levels: no op waits for another of its own level.

    All arrays are static. The end of an op lives in a slot until the last op that waits for it has
    started, then the slot is used again, so the state of a propagation stays small. Slot `START`
    always holds zero; a padding lane writes to slot `WASTE`.

    **Attributes:**

    - `ops`: `(levels, width)`, the op of each lane, or -1 for padding.
    - `reads`: `(levels, width, fan_in)`, the slots of the ends that an op waits for.
    - `writes`: `(levels, width)`, the slot that takes its end.
    - `predecessors`: `(levels, width, fan_in)`, the ops behind `reads`, or -1.
    - `num_slots`, `num_ops`.
    - `sinks`: `(sinks, fan)`, slots whose maximum at the end is a sink's end.
    - `sink_ops`: `(sinks, fan)`, the ops behind them, or -1.
    """

    ops: FrozenArray = eqx.field(static=True)
    reads: FrozenArray = eqx.field(static=True)
    writes: FrozenArray = eqx.field(static=True)
    predecessors: FrozenArray = eqx.field(static=True)
    sinks: FrozenArray = eqx.field(static=True)
    sink_ops: FrozenArray = eqx.field(static=True)
    num_slots: int = eqx.field(static=True)
    num_ops: int = eqx.field(static=True)


START = 0
WASTE = 1


def to_levels(
    predecessors: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], width: int | None = None
) -> Levels:
    """Cuts a graph into levels.

    **Arguments:**

    - `predecessors`: for each op, the ops it waits for; all have smaller numbers.
    - `sinks`: for each sink, the ops whose latest end is its end.
    - `width`: ops per level; by default the width that pads least. Ops with the longest way to go
        are placed first.

    **Returns:**

    The [`Levels`][].

    **Raises:**

    `ValueError` if an op waits for one that does not stand before it.
    """
    for op, before in enumerate(predecessors):
        if any(not 0 <= p < op for p in before):
            raise ValueError(
                f"Op {op} waits for {list(before)}; number the ops so that each waits for smaller "
                "numbers only."
            )
    if width is None:
        asap = np.zeros(len(predecessors), np.int64)
        for op, before in enumerate(predecessors):
            asap[op] = 1 + max((asap[p] for p in before), default=-1)
        widest = int(np.bincount(asap).max()) if len(asap) else 1
        # Random numbers come in pairs, and powers of two vectorise best. A level costs as much as a
        # lane or two of padding.
        candidates = [2**k for k in range(1, 7) if 2 ** (k - 1) < widest] or [1]
        rows = min(
            (_schedule(predecessors, w) for w in candidates[-3:]),
            key=lambda rows: len(rows) * (2 + max(map(len, rows), default=1)),
        )
    else:
        rows = _schedule(predecessors, width)
    return _allocate(rows, predecessors, sinks)


def _schedule(predecessors, width: int) -> list[list[int]]:
    """List scheduling: fills each level with the ready ops that have the longest way to go."""
    num_ops = len(predecessors)
    successors: list[list[int]] = [[] for _ in range(num_ops)]
    for op, before in enumerate(predecessors):
        for p in set(before):
            successors[p].append(op)
    to_go = [0] * num_ops
    for op in reversed(range(num_ops)):
        to_go[op] = 1 + max((to_go[s] for s in successors[op]), default=0)
    waiting = [len(set(before)) for before in predecessors]
    ready = [(-to_go[op], op) for op in range(num_ops) if not waiting[op]]
    heapq.heapify(ready)
    rows = []
    while ready:
        row = [heapq.heappop(ready)[1] for _ in range(min(width, len(ready)))]
        for op in row:
            for s in successors[op]:
                waiting[s] -= 1
                if not waiting[s]:
                    heapq.heappush(ready, (-to_go[s], s))
        rows.append(row)
    return rows


def _allocate(rows, predecessors, sinks) -> Levels:
    """Gives each op a slot from the level it ends in to the last level that reads it."""
    num_ops = len(predecessors)
    last_read = [-1] * num_ops
    for l, row in enumerate(rows):
        for op in row:
            for p in predecessors[op]:
                last_read[p] = l
    for ops in sinks:
        for op in ops:
            last_read[op] = len(rows)
    width = max(map(len, rows), default=1)
    fan_in = max((len(before) for before in predecessors), default=1) or 1
    ops = np.full((len(rows), width), -1, np.int32)
    reads = np.full((len(rows), width, fan_in), START, np.int32)
    before_ops = np.full((len(rows), width, fan_in), -1, np.int32)
    writes = np.full((len(rows), width), WASTE, np.int32)
    slot_of = [WASTE] * num_ops
    free: list[int] = []
    num_slots = 2
    releases: list[list[int]] = [[] for _ in range(len(rows) + 1)]
    for l, row in enumerate(rows):
        for lane, op in enumerate(row):
            before = predecessors[op]
            ops[l, lane] = op
            reads[l, lane, : len(before)] = [slot_of[p] for p in before]
            before_ops[l, lane, : len(before)] = before
        # All lanes of a level read before any writes, so a slot read here may be written here.
        for slot in releases[l]:
            heapq.heappush(free, slot)
        for lane, op in enumerate(row):
            if last_read[op] < 0:
                continue
            if not free:
                free.append(num_slots)
                num_slots += 1
            slot_of[op] = writes[l, lane] = heapq.heappop(free)
            releases[last_read[op]].append(slot_of[op])
    fan = max((len(s) for s in sinks), default=1) or 1
    sink_slots = np.full((len(sinks), fan), START, np.int32)
    sink_ops = np.full((len(sinks), fan), -1, np.int32)
    for row, members in enumerate(sinks):
        sink_slots[row, : len(members)] = [slot_of[op] for op in members]
        sink_ops[row, : len(members)] = members
    return Levels(
        ops=FrozenArray(ops),
        reads=FrozenArray(reads),
        writes=FrozenArray(writes),
        predecessors=FrozenArray(before_ops),
        sinks=FrozenArray(sink_slots),
        sink_ops=FrozenArray(sink_ops),
        num_slots=num_slots,
        num_ops=num_ops,
    )
