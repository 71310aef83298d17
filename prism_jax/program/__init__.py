from ._adjustment import Adjustment as Adjustment
from ._assemble import KINDS as KINDS, assemble as assemble
from ._block_laws import (
    BlockLaws as BlockLaws,
    block_laws as block_laws,
    block_laws_of as block_laws_of,
)
from ._branches import Overlaps as Overlaps, branch_moments as branch_moments, together as together
from ._check import (
    all_laws as all_laws,
    check_means as check_means,
    check_scale as check_scale,
    check_variability as check_variability,
)
from ._collapse import (
    Collapse as Collapse,
    Sides as Sides,
    class_moments as class_moments,
    segment_skewness as segment_skewness,
)
from ._collapse_of import (
    classes_of as classes_of,
    collapse_of as collapse_of,
    kernels_of as kernels_of,
)
from ._compile import (
    compile_job as compile_job,
    compile_program as compile_program,
)
from ._compile_graph import Op as Op, compile_graph as compile_graph
from ._constant_step import constant_step as constant_step
from ._constants import CONSTANT as CONSTANT, with_constants as with_constants
from ._digest import digest as digest
from ._expert_load import (
    Fullest as Fullest,
    Loads as Loads,
    Unevenness as Unevenness,
    fullest as fullest,
)
from ._fits import check_memory as check_memory
from ._idle import idle_keys as idle_keys
from ._lay_out import (
    ALONE as ALONE,
    BESIDE as BESIDE,
    CLOSES as CLOSES,
    JOINS as JOINS,
    MEETS as MEETS,
    OPENS as OPENS,
    ROW_ENDS as ROW_ENDS,
    STARTS as STARTS,
)
from ._loaded import (
    ExpertLoads as ExpertLoads,
    added_load as added_load,
    at_fullest as at_fullest,
    deciding as deciding,
    fuller as fuller,
)
from ._memory import (
    Memory as Memory,
    RankMemory as RankMemory,
    least_bytes as least_bytes,
    memory as memory,
)
from ._op_latencies import op_latencies as op_latencies, replay as replay
from ._predict import Prediction as Prediction, predict as predict
from ._program import (
    Program as Program,
    Stratum as Stratum,
    stall_rate as stall_rate,
)
from ._save import load_program as load_program, save_program as save_program
from ._segment import (
    NODE_SCORES as NODE_SCORES,
    gpu_factors as gpu_factors,
    segment_maxima as segment_maxima,
)
from ._sets import Sets as Sets
from ._sinks import Sink as Sink, cut_at_sinks as cut_at_sinks, sinks_of as sinks_of
from ._step_graph import LAUNCH as LAUNCH, StepGraph as StepGraph, step_graph as step_graph
from ._table import (
    LatencyTable as LatencyTable,
    kernel_cumulants as kernel_cumulants,
    relative_cumulants as relative_cumulants,
    unit_of as unit_of,
)
from ._throughput import Throughput as Throughput, throughput as throughput
from ._variability import (
    Network as Network,
    Stall as Stall,
    Variability as Variability,
    variability_of as variability_of,
)
