"""Groups of ranks that communicate, and the links that they use.

Ranks are ordered as in Megatron-LM: tensor-parallel fastest, then context, data and pipeline. A
link joins consecutive ranks, in blocks of its `group`.
"""

import msgspec

from ..data import Cluster, Layout, Link


class Group(msgspec.Struct, frozen=True):
    """Ranks `start, start + stride, ...`, as many as `size`; `start` may be any.

    **Attributes:**

    - `name`: the name of the group, such as `tp`.
    - `size`: the number of ranks.
    - `stride`: the distance between neighbouring ranks.
    """

    name: str
    size: int
    stride: int = 1


def tp_group(layout: Layout) -> Group:
    """The tensor-parallel group."""
    return Group("tp", layout.tp, 1)


def cp_group(layout: Layout) -> Group:
    """The context-parallel group."""
    return Group("cp", layout.cp, layout.tp)


def dp_group(layout: Layout) -> Group:
    """The group that reduces gradients: replicas, and the context-parallel ranks of each."""
    return Group("dp", layout.dp * layout.cp, layout.tp)


def etp_group(layout: Layout) -> Group:
    """The tensor-parallel group of experts."""
    return Group("etp", layout.expert_tp, 1)


def ep_group(layout: Layout) -> Group:
    """The group over which experts are distributed; it may span several replicas."""
    return Group("ep", layout.ep, layout.expert_tp)


def edp_group(layout: Layout) -> Group:
    """The group that reduces the gradients of experts: ranks of a stage with the same experts."""
    stage = layout.tp * layout.cp * layout.dp
    return Group("edp", stage // (layout.ep * layout.expert_tp), layout.ep * layout.expert_tp)


def all_group(layout: Layout) -> Group:
    """All ranks."""
    return Group("all", layout.world_size, 1)


def ranks_per_domain(group: Group, link: Link) -> int:
    """How many ranks of a group share one block of `link`."""
    return max(1, min(group.size, link.group // group.stride))


def find_link(cluster: Cluster, group: Group) -> Link:
    """The innermost link that contains every group of this kind entirely.

    Blocks of ranks and blocks of a link must nest: twelve ranks do not share nodes of eight, and of
    groups of three consecutive ranks one in four lies across two nodes.
    """
    span = group.size * group.stride
    for link in cluster.links:
        if group.size == 1 or (span <= link.group and link.group % span == 0):
            return link
    return cluster.links[-1]


def find_send_link(cluster: Cluster, layout: Layout, sender: int, receiver: int) -> Link:
    """The innermost link that joins each rank of one pipeline rank with its peer in the other."""
    stride = layout.tp * layout.cp * layout.dp
    first, second = sorted((sender, receiver))
    for link in cluster.links:
        # Every block that the sender's ranks touch must be the one of all their peers.
        if first * stride // link.group == ((second + 1) * stride - 1) // link.group:
            return link
    return cluster.links[-1]
