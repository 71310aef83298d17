from ._levels import Levels as Levels, to_levels as to_levels
from ._propagate import Latencies as Latencies, op_ends as op_ends, propagate as propagate
