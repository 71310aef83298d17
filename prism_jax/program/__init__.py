from ._assemble import assemble as assemble
from ._compile import (
    compile_job as compile_job,
    compile_program as compile_program,
)
from ._collapse import (
    class_moments as class_moments,
    NODE_SCORES as NODE_SCORES,
    segment_maxima as segment_maxima,
    slowest_nodes as slowest_nodes,
)
from ._program import (
    network_probabilities as network_probabilities,
    Program as Program,
    stall_probabilities as stall_probabilities,
    stall_rates as stall_rates,
    Stratum as Stratum,
)
from ._table import LatencyTable as LatencyTable
from ._variability import Network as Network, Stall as Stall, Variability as Variability
