"""Which ops run in which level: list scheduling, in time proportional to the number of ops."""

import heapq

import numpy as np

from .._ragged import Ragged, group, row_numbers


def list_schedule(before: Ragged, width: int | None) -> list[list[int]]:
    """Fills each level with the ready ops that have the longest way to go.

    **Arguments:**

    - `before`: for each op, the ops that it waits for; all have smaller numbers.
    - `width`: ops per level; by default the width that pads least.

    **Returns:**

    The ops of each level, the most urgent first.
    """
    num_ops = len(before.starts) - 1
    after = row_numbers(before)
    depth = _longest_ways(before.values, after, num_ops)
    to_go = _longest_ways(after[::-1], before.values[::-1], num_ops)
    # In the order of urgency, what is ready can be compared by bare numbers.
    by_urgency = np.argsort(-to_go, kind="stable")
    urgency = np.argsort(by_urgency)
    followers = group(urgency[before.values], urgency[after], num_ops)
    if width is None:
        rows = _cheapest(followers, depth, to_go)
    else:
        rows = _fill(followers, width)
    ops = by_urgency.tolist()
    return [[ops[i] for i in row] for row in rows]


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
        found = cost(len(rows), width), width
        if best is None or found < best:
            best, best_rows = found, rows
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
            for other in follower[start[op] : start[op + 1]]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, other)
        rows.append(row)
    return rows
