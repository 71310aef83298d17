"""Groups of ranks, and mean latencies of their collectives: an alpha-beta model with an efficiency
that depends on size.

Collectives are rings, as in NCCL: each rank sends `(n - 1) / n` of the gathered tensor in `n - 1`
hops. Within a domain of more than eight ranks, an all-reduce and an all-to-all have the hops of
eight. A small all-reduce between nodes uses a tree. If several ranks of a group share an inner
domain (a node), each reduces or gathers its share over its own network adapter while the inner
links run at the same time, so the slower of the two counts. NVLS (reduction in NVLink switches) is
part of the efficiency of all-reduces, which can therefore exceed one.
"""

import math
from collections import Counter

import msgspec

from ..data import Cluster, Kernels, Layout, Link


# How tokens are exchanged with experts: each has efficiencies of its own, or those of all_to_all.
DISPATCHERS = ("deepep", "hybridep")
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send_recv")
# The most hops of an all_reduce or all_to_all within an innermost domain: those of a ring of eight.
# A switch that joins more GPUs reduces by itself (NVLS), and lets each of them send to each: with
# TensorRT-LLM, 256 tokens reach 8 of 256 experts and come back in 0.12 ms on 8 GB200, in 0.13 ms on
# 16 and 0.14 ms on 32 and 64 (`../shared/data/operators/nvlink_alltoall.parquet`).
_SWITCHED = 7


class Group(msgspec.Struct, frozen=True):
    """Ranks `start, start + stride, ...`, as many as `size`; `start` may be any.

    Ranks are ordered as in Megatron-LM: tensor-parallel fastest, then context, data and pipeline. A
    link joins consecutive ranks, in blocks of its `group`.

    **Attributes:**

    - `name`: the name of the group, such as `tp`.
    - `size`: the number of ranks.
    - `stride`: the distance between neighbouring ranks.
    """

    name: str
    size: int
    stride: int = 1


def group_of(name: str, layout: Layout) -> Group:
    """A group of ranks of a layout.

    **Arguments:**

    - `name`: `tp` and `cp`, the tensor- and the context-parallel group; `dp`, which reduces
        gradients: replicas, and the context-parallel ranks of each; `etp`, the tensor-parallel
        group of experts; `ep`, over which experts are distributed, perhaps over several replicas;
        `edp`, which reduces the gradients of experts: the ranks of a stage with the same experts;
        `all`, all ranks.
    - `layout`: the layout.
    """
    tp, experts = layout.tp, layout.ep * layout.expert_tp
    size, stride = {
        "tp": (tp, 1),
        "cp": (layout.cp, tp),
        "dp": (layout.dp * layout.cp, tp),
        "etp": (layout.expert_tp, 1),
        "ep": (layout.ep, layout.expert_tp),
        "edp": (tp * layout.cp * layout.dp // experts, experts),
        "all": (layout.world_size, 1),
    }[name]
    return Group(name, size, stride)


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
        nests = link.axes or link.group % span == 0  # A slice of a torus has any shape.
        if group.size == 1 or (span <= link.group and nests):
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


def collective_latency(
    kind: str,
    num_bytes: float,
    group: Group,
    cluster: Cluster,
    kernels: Kernels,
    outside_bytes: float | None = None,
) -> float:
    """The mean latency of a collective, over the link that `find_link` finds.

    **Arguments:**

    - `kind`: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`; or one of `DISPATCHERS`,
        an `all_to_all` by other kernels.
    - `num_bytes`: the size of the full tensor: gathered, before scattering, or reduced. For
        `all_to_all`, the bytes that one rank sends.
    - `group`: the ranks that take part.
    - `cluster`, `kernels`: the machine, and the profile of its kernels.
    - `outside_bytes`: for an `all_to_all` that sends less between inner domains: the bytes that one
        rank sends, if its own domain got as much as any other; by default `num_bytes`.

    **Returns:**

    Seconds; zero for a group of one.
    """
    link = find_link(cluster, group)
    n = group.size
    if n == 1:
        return 0.0
    within = [inner for inner in cluster.links if inner.group < link.group]
    inner = [domain for domain in within if ranks_per_domain(group, domain) > 1]
    passes = 2 if kind == "all_reduce" else 1
    factor = _between_nodes(link, cluster, kernels)
    if not inner:
        rate = _bandwidth(kind, link, num_bytes, kernels) * torus_share(kind, link, n, cluster)
        seconds = passes * (n - 1) / n * num_bytes / rate
        hops = n - 1
        if kind not in ("all_gather", "reduce_scatter") and link.name == cluster.links[0].name:
            hops = min(hops, _SWITCHED)
        return factor * (seconds + passes * hops * link.latency_s)
    domain = inner[-1]  # The widest link inside `link` that holds more than one rank of the group.
    local = ranks_per_domain(group, domain)
    domains = math.ceil(n / local)
    share = num_bytes if kind in ("all_to_all", *DISPATCHERS) else num_bytes / local
    share = share if outside_bytes is None else outside_bytes
    # A ring takes all that each other rank has past every link; an exchange does not.
    parts = domains if kind in ("all_to_all", *DISPATCHERS) else n
    outside = factor * (parts - 1) / parts * share / _bandwidth(kind, link, num_bytes, kernels)
    rate = _bandwidth(kind, domain, num_bytes, kernels) * torus_share(kind, domain, local, cluster)
    inside = (local - 1) / local * num_bytes / rate
    moved = passes * max(outside, inside)
    hop = factor * link.latency_s
    ring = moved + passes * ((domains - 1) * hop + (n - domains) * domain.latency_s)
    if kind != "all_reduce":
        return ring
    # A tree of nodes, each a chain, has half the bandwidth and fewer hops (NCCL, tuning.cc).
    depth = math.ceil(math.log2(domains))
    tree = 2 * moved + passes * (depth * hop + (local - 1) * domain.latency_s)
    return min(ring, tree)


def torus_share(kind: str, link: Link, size: int, cluster: Cluster) -> float:
    """The share of a link's bandwidth that a collective of `size` ranks has; 1 unless the link is a
    torus.

    A slice of N devices with equal axes gives a group of n of them log n / log N of these, but one
    at least, on whose rings both directions carry a part. Between the ends of lines only one does.
    In an `all_to_all`, what is sent crosses a quarter of a ring of each axis.
    """
    slice_size = min(link.group, cluster.num_devices)
    if not link.axes or size == 1:
        return 1.0
    used = min(1.0, max(1 / link.axes, math.log(size) / math.log(slice_size)))
    share = used if slice_size >= link.rings_from else used / 2
    if kind not in ("all_to_all", *DISPATCHERS):
        return share
    axes = max(1.0, used * link.axes)
    return share / max(1.0, axes * size ** (1 / axes) / 4)


class Routing(msgspec.Struct, frozen=True):
    """The experts that a token may go to, all with equal probability within these limits.

    **Attributes:**

    - `copies`: how many different experts a token goes to.
    - `experts`: the number of experts.
    - `groups`: the number of groups of neighbouring experts, which are equally large.
    - `most_groups`: the most groups to whose experts a token goes. The groups are chosen first, all
        with equal probability (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    copies: int
    experts: int
    groups: int = 1
    most_groups: int = 1

    def parts_met(self, parts: int) -> float:
        """How many of equal parts of neighbouring experts have at least one of a token's experts,
        on average.
        """
        alike = Counter(self._shared_with_groups(part, parts) for part in range(parts))
        return parts - sum(n * self._missed_by(shared) for shared, n in alike.items())

    def _shared_with_groups(self, part: int, parts: int) -> tuple[float, ...]:
        """The number of experts that a part has of each group, for groups of which it has any."""
        in_group = self.experts // self.groups
        low, high = (self.experts * i / parts for i in (part, part + 1))
        groups = range(int(low // in_group), min(math.ceil(high / in_group), self.groups))
        shared = (min(high, in_group * (g + 1)) - max(low, in_group * g) for g in groups)
        return tuple(sorted(round(experts, 9) for experts in shared))

    def _missed_by(self, shared: tuple[float, ...]) -> float:
        """The probability that no expert of a token is in a part with these shares of groups."""
        # Of the choices of some of these groups: how many groups, with how many experts.
        ways = Counter({(0, 0.0): 1})
        for experts in shared:
            ways += Counter(
                {(n + 1, in_part + experts): many for (n, in_part), many in ways.items()}
            )
        open_to = self.experts // self.groups * self.most_groups
        elsewhere, free = self.groups - len(shared), self.most_groups
        chances = (
            many * math.comb(elsewhere, free - n) * self._missed(open_to, in_part)
            for (n, in_part), many in ways.items()
            if n <= free
        )
        return sum(chances) / math.comb(self.groups, free)

    def _missed(self, open_to: int, in_part: float) -> float:
        """The probability that none of the copies goes to `in_part` of the `open_to` experts."""
        elsewhere = open_to - in_part
        return math.prod(max(elsewhere - i, 0) / (open_to - i) for i in range(self.copies))


def dispatch_latency(
    kind: str,
    token_bytes: float,
    routing: Routing,
    group: Group,
    cluster: Cluster,
    kernels: Kernels,
) -> float:
    """The latency of an exchange by `kind`, one of `DISPATCHERS`, of tokens with experts, which are
    distributed over the group. A token is sent once to each inner domain and once to each rank that
    has any of its experts; the ranks of a domain forward it (DeepEP, DeepSeek-V3, arXiv:2412.19437,
    section 3.2.2).
    """
    link = find_link(cluster, group)
    inner = [inner for inner in cluster.links if inner.group < link.group]
    local = max((ranks_per_domain(group, narrower) for narrower in inner), default=1)
    ranks, domains = (
        token_bytes * routing.parts_met(parts)
        for parts in (group.size, math.ceil(group.size / local))
    )
    return collective_latency(kind, ranks, group, cluster, kernels, domains)


def send_recv_latency(num_bytes: float, link: Link, cluster: Cluster, kernels: Kernels) -> float:
    """The mean latency of sending `num_bytes` to one other rank over a link, in seconds."""
    rate = _bandwidth("send_recv", link, num_bytes, kernels) / (2 * link.axes or 1)
    seconds = num_bytes / rate + link.latency_s
    return _between_nodes(link, cluster, kernels) * seconds


def _between_nodes(link: Link, cluster: Cluster, kernels: Kernels) -> float:
    """The factor on transfers over a link: one for the innermost link, which is within a node."""
    return 1.0 if link.name == cluster.links[0].name else kernels.network


def _bandwidth(kind: str, link: Link, num_bytes: float, kernels: Kernels) -> float:
    table = kernels.find_efficiency(kind, link.name)
    if table is None and kind in DISPATCHERS:
        table = kernels.find_efficiency("all_to_all", link.name)
    table = table or kernels.find_efficiency("collective", "")
    efficiency = 1.0 if table is None else table.at(max(num_bytes, 1.0))
    return efficiency * link.bandwidth_bytes_per_s
