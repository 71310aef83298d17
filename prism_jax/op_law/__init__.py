from ._block import class_moments as class_moments
from ._classes import (
    Classes as Classes,
    Mixed as Mixed,
    classes_of as classes_of,
    mixed_of as mixed_of,
)
from ._sampled import (
    ClassLaw as ClassLaw,
    Collapsed as Collapsed,
    Common as Common,
    OpLaw as OpLaw,
    Pause as Pause,
    Single as Single,
    class_laws as class_laws,
    single_laws as single_laws,
)
from ._segment import gpu_factors as gpu_factors, segment_maxima as segment_maxima
from ._tables import (
    NUM_SCORES as NUM_SCORES,
    SCORE_RANGE as SCORE_RANGE,
    Table as Table,
    Tables as Tables,
    every_kind as every_kind,
    exact_gradients as exact_gradients,
    look_up as look_up,
    look_up_one as look_up_one,
    parameters_of as parameters_of,
    table_score as table_score,
    tabulate as tabulate,
)
