from ._outline import groups as groups, outline as outline
from ._read import (
    Trace as Trace,
    read_factors as read_factors,
    read_runs as read_runs,
    read_step_times as read_step_times,
    read_trace as read_trace,
)
