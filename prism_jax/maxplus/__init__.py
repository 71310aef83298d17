from ._by_numpy import critical_ops as critical_ops, op_ends as op_ends
from ._lanes import (
    Lanes as Lanes,
    bucket as bucket,
    cells as cells,
    in_lanes as in_lanes,
    to_lanes as to_lanes,
)
from ._levels import Levels as Levels, to_levels as to_levels
from ._paths import (
    cell_ends as cell_ends,
    cell_latencies as cell_latencies,
    critical_cells as critical_cells,
    latest_ends as latest_ends,
)
from ._propagate import (
    AbstractOpLaw as AbstractOpLaw,
    Latencies as Latencies,
    propagate as propagate,
)
