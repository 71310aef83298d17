from ._collective import (
    COLLECTIVES as COLLECTIVES,
    Routing as Routing,
    between_nodes as between_nodes,
    collective_latency as collective_latency,
    dispatch_latency as dispatch_latency,
    send_recv_latency as send_recv_latency,
)
from ._compute import compute_latency as compute_latency
from ._fit_shapes import (
    KINDS as KINDS,
    Kind as Kind,
    Measured as Measured,
    cross_validate as cross_validate,
    find_kind as find_kind,
    fit_shapes as fit_shapes,
    shape_latencies as shape_latencies,
)
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
from ._power import (
    clock_factor as clock_factor,
    clock_factors as clock_factors,
    drawn as drawn,
)
from ._shapes import (
    attention_latency as attention_latency,
    attention_sizes as attention_sizes,
    deepep_latency as deepep_latency,
    experts_latency as experts_latency,
    gemm_latency as gemm_latency,
    mla_latency as mla_latency,
    node_collective_latency as node_collective_latency,
    nvlink_all_to_all_latency as nvlink_all_to_all_latency,
    shape_latency as shape_latency,
)
