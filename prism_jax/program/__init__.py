from ._adjustment import Adjustment as Adjustment
from ._assemble import assemble as assemble
from ._check import check_variability as check_variability
from ._collapse import (
    NODE_SCORES as NODE_SCORES,
    class_moments as class_moments,
    gpu_factors as gpu_factors,
    segment_maxima as segment_maxima,
    segment_skewness as segment_skewness,
)
from ._compile import (
    compile_job as compile_job,
    compile_program as compile_program,
)
from ._compile_profile import compile_profile as compile_profile
from ._digest import digest as digest
from ._program import (
    Program as Program,
    Stratum as Stratum,
    network_probabilities as network_probabilities,
    stall_probabilities as stall_probabilities,
    stall_rates as stall_rates,
)
from ._save import load_program as load_program, save_program as save_program
from ._step_graph import (
    StepGraph as StepGraph,
    op_latencies as op_latencies,
    replay as replay,
    step_graph as step_graph,
)
from ._table import LatencyTable as LatencyTable
from ._variability import Network as Network, Stall as Stall, Variability as Variability
