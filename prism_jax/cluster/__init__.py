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
from ._compute import (
    clock_factor as clock_factor,
    clock_factors as clock_factors,
    compute_latency as compute_latency,
    drawn as drawn,
    gemm_latency as gemm_latency,
    shape_latency as shape_latency,
)
from ._fit_shapes import (
    KINDS as KINDS,
    MeasuredLatencies as MeasuredLatencies,
    attention_sizes as attention_sizes,
    cross_validate as cross_validate,
    fit_shapes as fit_shapes,
    shape_latencies as shape_latencies,
)
