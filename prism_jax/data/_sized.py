"""A cluster is a family and a number of nodes: its links, for that number."""

from typing import Any


def sized(table: dict[str, Any], num_nodes: Any = None) -> dict[str, Any]:
    """The table of a cluster of so many nodes, by default as many as it says itself.

    A link without a `group` joins all devices; where one before it does already, there is none.

    **Raises:**

    A `ValueError` of one clause where nothing says how many nodes there are.
    """
    table = dict(table)
    if num_nodes is not None:
        table["num_nodes"] = num_nodes
    if "num_nodes" not in table:
        raise ValueError(
            f"the cluster `{table.get('name', '')}` is a family; say how many nodes it has as "
            "`num_nodes`"
        )
    nodes, each, links = (table.get(key) for key in ("num_nodes", "devices_per_node", "links"))
    if type(nodes) is not int or type(each) is not int or not isinstance(links, list):
        return table  # Which of them is wrong is said where it is converted.
    kept: list[Any] = []
    for link in links:
        if isinstance(link, dict) and "group" not in link:
            if kept and _joined(kept[-1]) >= nodes * each:
                continue
            link = {**link, "group": nodes * each}
        kept.append(link)
    return {**table, "links": kept}


def _joined(link: Any) -> int:
    group = link.get("group") if isinstance(link, dict) else None
    return group if type(group) is int else 0
