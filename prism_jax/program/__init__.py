from ._assemble import KINDS as KINDS, assemble as assemble
from ._blocks import (
    Blocks as Blocks,
    Overlaps as Overlaps,
    Waits as Waits,
    count_calls as count_calls,
)
from ._compile import (
    compile_job as compile_job,
    compile_program as compile_program,
)
from ._compile_graph import Op as Op, compile_graph as compile_graph
from ._program import (
    Adjustment as Adjustment,
    LatencyTable as LatencyTable,
    Ops as Ops,
    Program as Program,
    Rows as Rows,
    Sinks as Sinks,
    check_means as check_means,
    check_scale as check_scale,
    digest as digest,
    sizes_of as sizes_of,
    stall_rate as stall_rate,
)
from ._save import load_program as load_program, save_program as save_program
from ._variability import (
    Network as Network,
    Sets as Sets,
    SharedNetwork as SharedNetwork,
    Stall as Stall,
    Variability as Variability,
    all_laws as all_laws,
    check_variability as check_variability,
    variability_of as variability_of,
)
