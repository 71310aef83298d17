from ._factors import read_factors as read_factors
from ._ops import COMPUTE as COMPUTE
from ._outline import groups as groups, outline as outline
from ._read_trace import read_trace as read_trace
from ._step_times import read_runs as read_runs, read_step_times as read_step_times
from ._trace import Trace as Trace
