from ._collective import (
    COLLECTIVES as COLLECTIVES,
    Routing as Routing,
    between_nodes as between_nodes,
    collective_latency as collective_latency,
    dispatch_latency as dispatch_latency,
    send_recv_latency as send_recv_latency,
)
from ._compute import compute_latency as compute_latency
from ._group import (
    Group as Group,
    all_group as all_group,
    cp_group as cp_group,
    dp_group as dp_group,
    edp_group as edp_group,
    ep_group as ep_group,
    etp_group as etp_group,
    find_link as find_link,
    find_send_link as find_send_link,
    tp_group as tp_group,
)
