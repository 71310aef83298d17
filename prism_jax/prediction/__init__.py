from ._advice import (
    costly_keys as costly_keys,
    effects_of_stack as effects_of_stack,
    idle_keys as idle_keys,
    nearest_stack as nearest_stack,
    uncounted as uncounted,
)
from ._expected_error import (
    LEVEL_STEPS as LEVEL_STEPS,
    ExpectedError as ExpectedError,
    class_of as class_of,
    expected_error as expected_error,
    levels_of_law as levels_of_law,
    slope_of_level as slope_of_level,
    slopes_of_level as slopes_of_level,
    with_level as with_level,
)
from ._least import ModelPasses as ModelPasses, least_seconds as least_seconds
from ._memory import (
    Memory as Memory,
    fits as fits,
    least_bytes as least_bytes,
    memory as memory,
    usable_bytes as usable_bytes,
)
from ._predict import (
    Prediction as Prediction,
    constant_step as constant_step,
    kernels_of_ops as kernels_of_ops,
    mean_step as mean_step,
    parts_table as parts_table,
    predict as predict,
    rate_form as rate_form,
    with_values as with_values,
)
from ._shortage import shortage as shortage
from ._throughput import (
    Energy as Energy,
    Throughput as Throughput,
    energy as energy,
    throughput as throughput,
)
