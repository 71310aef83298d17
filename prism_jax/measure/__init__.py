from ._calls import (
    Call as Call,
    LayerSizes as LayerSizes,
    layer_calls as layer_calls,
    sizes_of_grid as sizes_of_grid,
    sizes_of_job as sizes_of_job,
    stream_calls as stream_calls,
)
from ._machine import (
    FILES as FILES,
    kinds_of as kinds_of,
    rates_of as rates_of,
    save_machine as save_machine,
)
from ._scatter import Scatter as Scatter, split_scatter as split_scatter
from ._time import Timed as Timed, calls_for as calls_for, time_calls as time_calls
