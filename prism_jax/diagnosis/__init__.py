# Is a measured step time normal, and what explains it? `_changes` says how each cause and each
# setting would change a step, `_evidence` what measured steps and traces show, and `_diagnose`
# weighs all of this. `_beside` has the parts of a profiled step beside those of its prediction, and
# `_eager` the kernels of plain PyTorch.
from ._beside import (
    StepPart as StepPart,
    beside_table as beside_table,
    measured_beside as measured_beside,
)
from ._changes import (
    Setting as Setting,
    quickest_change as quickest_change,
    settings_of as settings_of,
)
from ._diagnose import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
    diagnose_ranks as diagnose_ranks,
    hypotheses as hypotheses,
)
from ._eager import (
    KernelClass as KernelClass,
    calibrated_to_profile as calibrated_to_profile,
    classes_table as classes_table,
    kernel_classes as kernel_classes,
)
from ._slow_ranks import (
    SlowRanks as SlowRanks,
    slow_ranks as slow_ranks,
    wait_for_spare as wait_for_spare,
)
