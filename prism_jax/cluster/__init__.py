from ._collective import (
    COLLECTIVES as COLLECTIVES,
    Group as Group,
    Routing as Routing,
    collective_latency as collective_latency,
    dispatch_latency as dispatch_latency,
    find_link as find_link,
    find_send_link as find_send_link,
    group_of as group_of,
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
