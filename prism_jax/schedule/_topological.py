from collections.abc import Callable


def topological_order(waits: list[list[int]], describe: Callable[[int], str]) -> list[int]:
    """The nodes in an order in which each comes after all nodes that it waits for.

    **Arguments:**

    - `waits`: for each node, the nodes that it waits for.
    - `describe`: how an error names a node.

    **Raises:**

    A `ValueError` that names the nodes of a cycle.
    """
    followers = [[] for _ in waits]
    for node, before in enumerate(waits):
        for other in before:
            followers[other].append(node)
    missing = [len(before) for before in waits]
    order = [node for node, count in enumerate(missing) if count == 0]
    # The list grows while it is walked: it is its own queue.
    for node in order:
        for follower in followers[node]:
            missing[follower] -= 1
            if missing[follower] == 0:
                order.append(follower)
    if len(order) < len(waits):
        cycle = _cycle(waits, missing)
        others = ", ".join(describe(node) for node in cycle[1:4])
        raise ValueError(
            f"The orders deadlock: {describe(cycle[0])} waits for itself, by way of {others}"
            f"{' and others' if len(cycle) > 4 else ''}; change the order of these ranks, or the "
            "number of microbatches."
        )
    return order


def _cycle(waits: list[list[int]], missing: list[int]) -> list[int]:
    """The nodes of one cycle of waits, among those that never start; the lowest comes first."""
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
