from ._branches import Overlaps as Overlaps
from ._collapse import (
    Blocks as Blocks,
    Waits as Waits,
    class_moments as class_moments,
    segment_skewness as segment_skewness,
)
from ._lay_out import (
    count_calls as count_calls,
    count_layers as count_layers,
    expert_loads as expert_loads,
    lay_out_collapse as lay_out_collapse,
)
from ._segment import NODE_SCORES as NODE_SCORES, gpu_factors as gpu_factors
from ._stalls import Stalls as Stalls
from ._workers import slowest_workers as slowest_workers
