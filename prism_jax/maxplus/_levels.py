"""Topological levels of a graph of ops, and where the end of each op is kept while it is needed."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np

from .._misc import FrozenArray
from .._ragged import Ragged, pad, ragged, row_numbers
from ._list_schedule import list_schedule


class Levels(eqx.Module):
    """A graph of ops cut into levels: no op waits for another of its own level.

    Static: what a program keeps; `to_lanes` makes of it what `propagate` takes. The end of an op
    lives in a slot until the last op that waits for it has started, then the slot is used again, so
    the state of a propagation stays small. Slot `START` always holds zero; a padding lane writes to
    slot `WASTE`.

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
    before = ragged(predecessors)
    bad = (before.values < 0) | (before.values >= row_numbers(before))
    if bad.any():
        op = int(row_numbers(before)[np.argmax(bad)])
        raise ValueError(
            f"Op {op} waits for {list(predecessors[op])}; number the ops so that each waits for "
            "smaller numbers only."
        )
    rows = ragged(list_schedule(before, width))
    sink_ops = ragged(sinks)
    slots, num_slots = _allocate(rows, before, sink_ops.values)

    # Padding is -1, so it takes the last entry, which is made for it.
    ops = pad(rows, -1)
    before_ops = np.pad(pad(before, -1), ((0, 1), (0, 0)), constant_values=-1)[ops]
    read_slots = np.append(slots, np.int32(START))
    return Levels(
        ops=FrozenArray(ops),
        reads=FrozenArray(read_slots[before_ops]),
        writes=FrozenArray(np.append(slots, np.int32(WASTE))[ops]),
        predecessors=FrozenArray(before_ops),
        sinks=FrozenArray(read_slots[pad(sink_ops, -1)]),
        sink_ops=FrozenArray(pad(sink_ops, -1)),
        num_slots=num_slots,
        num_ops=len(predecessors),
    )


def _allocate(rows: Ragged, before: Ragged, sink_ops: np.ndarray) -> tuple[np.ndarray, int]:
    """Gives each op a slot from the level it ends in to the last level that reads it.

    **Returns:**

    The slot of each op, `WASTE` where nobody reads it, and the number of slots.
    """
    num_levels = len(rows.starts) - 1
    level = np.empty_like(rows.values)
    level[rows.values] = row_numbers(rows)
    last_read = np.full_like(level, -1)
    np.maximum.at(last_read, before.values, level[row_numbers(before)])
    last_read[sink_ops] = num_levels

    kept = rows.values[last_read[rows.values] >= 0]
    # All lanes of a level read before any writes, so a slot read there may be written there.
    written = np.bincount(level[kept], minlength=num_levels + 1)
    released = np.bincount(last_read[kept], minlength=num_levels + 1)
    most = int(np.cumsum(written - released).max())
    # The first ops take new slots, each later one the slot that was released first and not yet
    # taken. There always is one, for at no time are more than `most` in use.
    queue = list(range(2, 2 + most))
    for releaser in np.argsort(last_read[kept], kind="stable")[: len(kept) - most].tolist():
        queue.append(queue[releaser])
    slots = np.full(len(level), WASTE, np.int32)
    slots[kept] = queue
    return slots, 2 + most
