"""Topological levels of a graph of ops, and where the end of each op is kept while it is needed."""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Int, UInt32

from .._padding import AnyArray, bucket
from .._ragged import Ragged, as_matrix, group, ragged, row_numbers


# A lane reads at most so many ends: what waits for more waits for joins of so many each, and these
# for further joins, so that memory grows with the edges and not with the widest op.
MOST_READS = 4
_MOST_READS_OF_SINK = 16  # It reads only once, at the end.


class _Joined(NamedTuple):
    """A graph whose wide ops and sinks wait for joins, which take no time. Ops and joins together
    are nodes, in an order in which each waits for nodes before it.

    **Attributes:**

    - `before`: for each node, the nodes that it waits for.
    - `sinks`: for each sink, the nodes whose latest end is its end.
    - `number`: for each node the number of its op; those of joins follow.
    """

    before: Ragged
    sinks: Ragged
    number: np.ndarray


def _joined(predecessors: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]]) -> _Joined:
    num_ops = len(predecessors)
    before, of_sinks = ragged(predecessors), ragged(sinks)
    widest, widest_sink = (int(np.diff(x.starts).max(initial=0)) for x in (before, of_sinks))
    if widest <= MOST_READS and widest_sink <= _MOST_READS_OF_SINK:
        return _Joined(before, of_sinks, np.arange(num_ops))
    rows: list[Sequence[int]] = []
    number: list[int] = []
    node_of: list[int] = []
    joins: dict[tuple[int, ...], int] = {}

    def few(nodes: list[int], most: int) -> list[int]:
        """The same nodes, or joins of them, at most so many: in order, so that the first of equal
        ends remains the first. Equal parts share a join.
        """
        while len(nodes) > most:
            parts = [tuple(nodes[i : i + MOST_READS]) for i in range(0, len(nodes), MOST_READS)]
            for part in parts:
                if len(part) > 1 and part not in joins:
                    number.append(num_ops + len(joins))
                    joins[part] = len(rows)
                    rows.append(part)
            nodes = [joins.get(part, part[0]) for part in parts]
        return nodes

    for op, waits in enumerate(predecessors):
        reads = few([node_of[p] for p in waits], MOST_READS)
        node_of.append(len(rows))
        number.append(op)
        rows.append(reads)
    ends = [few([node_of[op] for op in sink], _MOST_READS_OF_SINK) for sink in sinks]
    return _Joined(ragged(rows), ragged(ends), np.array(number))


def list_schedule(before: Ragged, joins: np.ndarray, width: int | None) -> list[list[int]]:
    """Fills each level with the ready joins, after which what they join need not be kept, and then
    with the ready ops that have the longest way to go.

    **Arguments:**

    - `before`: for each node, the nodes that it waits for; all have smaller numbers.
    - `joins`: whether each node is a join.
    - `width`: nodes per level; by default the width that pads least.

    **Returns:**

    The nodes of each level, the most urgent first.
    """
    num_nodes = len(joins)
    after = row_numbers(before)
    depth = _longest_ways(before.values, after, num_nodes)
    to_go = _longest_ways(after[::-1], before.values[::-1], num_nodes)
    # In the order of urgency, what is ready can be compared by bare numbers.
    by_urgency = np.argsort(np.where(joins, -num_nodes, -to_go), kind="stable")
    urgency = np.argsort(by_urgency)
    followers = group(urgency[before.values], urgency[after], num_nodes)
    if width is None:
        rows = _cheapest(followers, depth, to_go)
    else:
        rows = _fill(followers, width)
    nodes = by_urgency.tolist()
    return [[nodes[i] for i in row] for row in rows]


def _longest_ways(tails: np.ndarray, heads: np.ndarray, num_ops: int) -> np.ndarray:
    """How many edges the longest way to each op has.

    All edges into an op must stand before those out of it.
    """
    longest = [0] * num_ops
    for tail, head in zip(tails.tolist(), heads.tolist(), strict=True):
        steps = longest[tail] + 1
        if steps > longest[head]:
            longest[head] = steps
    return np.array(longest, np.int64)


def _cheapest(followers: Ragged, depth: np.ndarray, to_go: np.ndarray) -> list[list[int]]:
    """The levels of the width that pads least."""
    widest = int(np.bincount(depth).max(initial=1))
    # Random numbers come in pairs, and powers of two vectorise best.
    widths = [2**k for k in range(1, 7) if 2 ** (k - 1) < widest] or [1]

    def cost(num_levels: int, width: int) -> int:
        # A level costs as much as a lane of padding.
        return num_levels * (1 + min(width, widest))

    bounds = []
    for width in widths[-3:]:
        fewest = max(_fewest_levels(depth, width), _fewest_levels(to_go, width))
        bounds.append((cost(fewest, width), width))
    best, best_rows = None, []
    # List scheduling mostly comes close to the bound, so that the first width is the only one.
    for bound, width in sorted(bounds):
        if best is not None and (bound, width) > best:
            break
        rows = _fill(followers, width)
        padded = cost(len(rows), width), width
        if best is None or padded < best:
            best, best_rows = padded, rows
    return best_rows


def _fewest_levels(distance: np.ndarray, width: int) -> int:
    """A number of levels below which no schedule comes, from the distances of ops to one end of it.

    For each `k`, the ops that are `k` or more from that end do not fit into the `k` levels there.
    """
    beyond = np.cumsum(np.bincount(distance)[::-1])[::-1]
    return int((np.arange(len(beyond)) + -(-beyond // width)).max(initial=0))


def _fill(followers: Ragged, width: int) -> list[list[int]]:
    num_ops = len(followers.starts) - 1
    follower, start = followers.values.tolist(), followers.starts.tolist()
    waiting = np.bincount(followers.values, minlength=num_ops).tolist()
    ready = [op for op, count in enumerate(waiting) if not count]
    rows = []
    while ready:
        row = [heapq.heappop(ready) for _ in range(min(width, len(ready)))]
        for op in row:
            for next_op in follower[start[op] : start[op + 1]]:
                waiting[next_op] -= 1
                if not waiting[next_op]:
                    heapq.heappush(ready, next_op)
        rows.append(row)
    return rows


START = 0
WASTE = 1


class Levels(eqx.Module):
    """A graph of ops cut into levels: no op waits for another of its own level.

    The end of an op lives in a slot until the last op that waits for it has started, then the slot
    is used again, so the state of a propagation stays small. Slot `START` always holds zero; a
    padding lane writes to slot `WASTE`. Levels from `num_levels` on are padding that no loop
    visits.

    What waits for many ends waits for joins of a few each, which are like ops that take no time.

    The cell of an op or a join is its level times the width, plus its lane.

    **Attributes:**

    - `ops`: the op of each lane; -1 for padding, and -2, -3 ... for joins.
    - `reads`: the slots of the ends that an op waits for.
    - `writes`: the slot that takes its end.
    - `before`: the cells of the ops behind `reads`, or -1.
    - `sinks`: slots whose maximum at the end is a sink's end.
    - `sink_cells`: the cells of the ops behind them, or -1.
    - `num_levels`, `num_ops`, `num_joins`: how many there are.
    - `pairs`: how many pairs of random numbers a level has: for the most ops of a level.
    - `num_slots`: static.
    - `joins`: whether there are joins. Static, so that graphs without any do not compute that these
        take no time.
    """

    ops: Int[AnyArray, "levels width"] = eqx.field(metadata={"fill": -1})
    reads: Int[AnyArray, "levels width fan_in"] = eqx.field(metadata={"fill": START})
    writes: Int[AnyArray, "levels width"] = eqx.field(metadata={"fill": WASTE})
    before: Int[AnyArray, "levels width fan_in"] = eqx.field(metadata={"fill": -1})
    sinks: Int[AnyArray, "sinks fan"] = eqx.field(metadata={"fill": START})
    sink_cells: Int[AnyArray, "sinks fan"] = eqx.field(metadata={"fill": -1})
    num_levels: int | Int[AnyArray, ""]
    num_ops: int | Int[AnyArray, ""]
    num_joins: int | Int[AnyArray, ""]
    pairs: int | UInt32[AnyArray, ""]
    num_slots: int = eqx.field(static=True)
    joins: bool = eqx.field(static=True)

    @property
    def width(self) -> int:
        return self.ops.shape[1]

    @property
    def nodes(self) -> Int[np.ndarray, "levels width"]:
        """The op of each lane, or its join, whose numbers follow those of the ops."""
        ops: Any = self.ops
        return np.where(ops < -1, self.num_ops - 2 - ops, ops)

    @property
    def predecessors(self) -> Int[np.ndarray, "levels width fan_in"]:
        """The ops and joins behind `reads`, or -1."""
        return np.append(self.nodes, -1)[self.before]

    @property
    def sink_ops(self) -> Int[np.ndarray, "sinks fan"]:
        """The ops and joins behind `sinks`, or -1."""
        return np.append(self.nodes, -1)[self.sink_cells]


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
    graph = _joined(predecessors, sinks)
    num_ops = len(predecessors)
    rows = ragged(list_schedule(graph.before, graph.number >= num_ops, width))
    slots, num_slots = _allocate(rows, graph.before, graph.sinks.values)

    # Padding is -1, so it takes the last entry, which is made for it.
    nodes, sink_nodes = as_matrix(rows, -1), as_matrix(graph.sinks, -1)
    most_ops = nodes.shape[1]
    nodes = np.pad(nodes, ((0, 0), (0, bucket(most_ops, 2) - most_ops)), constant_values=-1)
    before_nodes = np.pad(as_matrix(graph.before, -1), ((0, 1), (0, 0)), constant_values=-1)[nodes]
    number = np.where(graph.number < num_ops, graph.number, num_ops - 2 - graph.number)
    there, cell = nodes >= 0, np.full(len(number) + 1, -1, np.int32)
    cell[nodes[there]] = np.flatnonzero(there)
    read_slots = np.append(slots, np.int32(START))
    return Levels(
        ops=np.append(number, -1).astype(np.int32)[nodes],
        reads=read_slots[before_nodes],
        writes=np.append(slots, np.int32(WASTE))[nodes],
        before=cell[before_nodes],
        sinks=read_slots[sink_nodes],
        sink_cells=cell[sink_nodes],
        num_levels=len(nodes),
        num_ops=num_ops,
        num_joins=len(number) - num_ops,
        pairs=-(-most_ops // 2),
        num_slots=num_slots,
        joins=len(number) > num_ops,
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
