"""Clusters of a family with a given number of nodes."""

from typing import Any


_MOST = 10**9  # The largest value of any count in a file.


def sized(table: dict[str, Any], num_nodes: Any = None) -> dict[str, Any]:
    """The table of a cluster with `num_nodes` nodes, by default the number in the table itself.

    A link without a `group` joins all devices. It is left out if a link before it already does.

    **Raises:**

    A `ValueError`, whose message is a clause, if the number of nodes is not given or is too large.
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
    # A value that is not a number is refused later, when the table is converted.
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
