from ._lanes import cells as cells, in_lanes as in_lanes
from ._latencies import AbstractOpLaw as AbstractOpLaw, Latencies as Latencies
from ._levels import Levels as Levels, to_levels as to_levels
from ._paths import (
    cell_latencies as cell_latencies,
    critical_ops as critical_ops,
    edges_of as edges_of,
    latest_ends as latest_ends,
    op_ends as op_ends,
    predecessors_of as predecessors_of,
)
from ._propagate import propagate as propagate, propagate_to as propagate_to
