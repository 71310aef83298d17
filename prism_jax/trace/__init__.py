from ._contents import Contents as Contents, KernelPool as KernelPool, contents as contents
from ._factors import read_factors as read_factors
from ._formats import FORMATS as FORMATS, read_ranks as read_ranks
from ._ops import COMPUTE as COMPUTE, LETTERS as LETTERS
from ._orders import stages_of_ranks as stages_of_ranks
from ._outline import groups as groups, outline as outline
from ._range_names import (
    RangeNames as RangeNames,
    RangeRule as RangeRule,
    read_range_names as read_range_names,
)
from ._read_ranks import read_profile_traces as read_profile_traces, write_ops as write_ops
from ._read_trace import read_trace as read_trace
from ._step_times import read_runs as read_runs, read_step_times as read_step_times
from ._trace import Trace as Trace
