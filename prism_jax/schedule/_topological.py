from collections.abc import Callable

import numpy as np

from .._ragged import group
from ._nodes import Nodes


def topological_order(nodes: Nodes, num_nodes: int, describe: Callable[[int], str]) -> list[int]:
    """The nodes in an order in which each comes after all nodes that it waits for.

    **Arguments:**

    - `nodes`: which node waits for which.
    - `num_nodes`: how many there are.
    - `describe`: how an error names a node.

    **Raises:**

    A `ValueError` that names the nodes of a cycle.
    """
    followers = group(nodes.before, nodes.after, num_nodes)
    follower, start = followers.values.tolist(), followers.starts.tolist()
    missing = np.bincount(nodes.after, minlength=num_nodes).tolist()
    order = [node for node, count in enumerate(missing) if count == 0]
    # The list grows while it is walked: it is its own queue.
    for node in order:
        for other in follower[start[node] : start[node + 1]]:
            missing[other] -= 1
            if missing[other] == 0:
                order.append(other)
    if len(order) < num_nodes:
        cycle = _cycle(nodes, missing)
        others = ", ".join(describe(node) for node in cycle[1:4])
        raise ValueError(
            f"The orders deadlock: {describe(cycle[0])} waits for itself, by way of {others}"
            f"{' and others' if len(cycle) > 4 else ''}; change the order of these ranks, or the "
            "number of microbatches."
        )
    return order


def _cycle(nodes: Nodes, missing: list[int]) -> list[int]:
    """The nodes of one cycle of waits, among those that never start; the lowest comes first."""
    waits = [[] for _ in missing]
    for other, node in zip(nodes.before.tolist(), nodes.after.tolist(), strict=True):
        waits[node].append(other)
    node = next(node for node, count in enumerate(missing) if count)
    seen = {}
    path = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(other for other in waits[node] if missing[other])
    cycle = path[seen[node] :]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
