from ._levels import Levels as Levels, to_levels as to_levels
from ._paths import (
    critical_ops as critical_ops,
    latest_ends as latest_ends,
    op_latencies as op_latencies,
)
from ._propagate import Latencies as Latencies, op_ends as op_ends, propagate as propagate
