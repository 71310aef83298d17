from ._constant_step import constant_step as constant_step
from ._costly import costly_keys as costly_keys
from ._energy import Energy as Energy, energy as energy
from ._expected_error import (
    ExpectedError as ExpectedError,
    class_of as class_of,
    expected_error as expected_error,
    levels_of_law as levels_of_law,
)
from ._fits import check_memory as check_memory
from ._idle import idle_keys as idle_keys
from ._least import Passes as Passes, least_seconds as least_seconds
from ._level import (
    LEVEL_STEPS as LEVEL_STEPS,
    slope_of_level as slope_of_level,
    slopes_of_level as slopes_of_level,
    with_level as with_level,
)
from ._memory import Memory as Memory, least_bytes as least_bytes, memory as memory
from ._predict import Prediction as Prediction, predict as predict
from ._throughput import (
    Throughput as Throughput,
    parts_table as parts_table,
    throughput as throughput,
)
