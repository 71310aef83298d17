from ._ends import (
    TILE as TILE,
    Lead as Lead,
    Sampled as Sampled,
    by_strata as by_strata,
    led as led,
    poisson_stalls as poisson_stalls,
    replica_end as replica_end,
    replica_ends as replica_ends,
    replica_latencies as replica_latencies,
    sample_replica_ends as sample_replica_ends,
    stall_entries as stall_entries,
)
from ._lead import leading_axes as leading_axes, redirected as redirected
from ._plan import (
    Plan as Plan,
    gradients_of as gradients_of,
    load_numbers as load_numbers,
    make_plan as make_plan,
    mean_reductions as mean_reductions,
    reduction_laws as reduction_laws,
    strata_columns as strata_columns,
    stratum_of as stratum_of,
    structure_of as structure_of,
    tables_of_each as tables_of_each,
    until_reduced as until_reduced,
    with_tables as with_tables,
    without_graph as without_graph,
    without_ops as without_ops,
    without_steps as without_steps,
)
from ._tiles import (
    Batch as Batch,
    on_accelerator as on_accelerator,
    on_all_devices as on_all_devices,
    tile_size as tile_size,
    tiles as tiles,
    tiles_of as tiles_of,
)
