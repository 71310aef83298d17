# Profiles become a trace in steps: `_profilers`, `_xla` and `_chakra` read the spans of a rank
# (`_spans`). `_work` says what each of its kernels is, and in which phase, by its launch and the
# names of `_trace`; `_steps`, when steps begin and end. `_where` tells where their time goes;
# `_rank_ops` gives their ops, and `_join_ranks` a table of the ops of all ranks. `_read_trace`
# checks such a table, which a file may hold too, for the `_trace`. `_read_ranks` calls them in this
# order.
from ._contents import Contents as Contents, contents as contents
from ._orders import stages_of_ranks as stages_of_ranks
from ._rank_ops import median_steps as median_steps
from ._read_kernels import (
    check_columns as check_columns,
    measured_kernels as measured_kernels,
    read_kernels as read_kernels,
)
from ._read_ranks import (
    TraceReader as TraceReader,
    read_profile_traces as read_profile_traces,
    read_rank_traces as read_rank_traces,
    write_ops as write_ops,
)
from ._read_trace import read_trace as read_trace
from ._spans import Kind as Kind, RankTrace as RankTrace, SpanList as SpanList
from ._tables import (
    names_of_columns as names_of_columns,
    read_factors as read_factors,
    read_runs as read_runs,
    read_step_times as read_step_times,
)
from ._trace import (
    COMPUTE as COMPUTE,
    LETTERS as LETTERS,
    Trace as Trace,
    groups as groups,
    outline as outline,
    read_range_names as read_range_names,
)
from ._where import (
    RankWhere as RankWhere,
    median_step_times as median_step_times,
)
