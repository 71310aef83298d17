"""A cluster is a family and a number of nodes: its links, for that number."""

from typing import Any


_MOST = 10**9  # As of any count.


def sized(table: dict[str, Any], num_nodes: Any = None) -> dict[str, Any]:
    """The table of a cluster of so many nodes, by default as many as it says itself.

    A link without a `group` joins all devices; where one before it does already, there is none.

    **Raises:**

    A `ValueError` of one clause where nothing says how many nodes there are, or too many.
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
    if not isinstance(links, list):
        return table
    # Where one of these is no number, that is said where it is converted.
    devices = nodes * each if type(nodes) is int and type(each) is int else 1
    if devices > _MOST:
        raise ValueError(
            f"`num_nodes` = {nodes} with {each} devices each is more than the {_MOST:,} devices "
            "that a cluster may have; give fewer"
        )
    kept: list[Any] = []
    for link in links:
        if isinstance(link, dict) and "group" not in link:
            if kept and _joined(kept[-1]) >= devices:
                continue
            link = {**link, "group": max(devices, 1)}
        kept.append(link)
    return {**table, "links": kept}


def _joined(link: Any) -> int:
    group = link.get("group") if isinstance(link, dict) else None
    return group if type(group) is int else 0
