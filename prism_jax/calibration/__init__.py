from ._calibrate import calibrate as calibrate
from ._calibrated_job import agreement as agreement, calibrated_as as calibrated_as
from ._epistemic import (
    STEP_LEVELS as STEP_LEVELS,
    Epistemic as Epistemic,
    epistemic as epistemic,
    level_of_runs as level_of_runs,
    possible_runs as possible_runs,
)
from ._observe import check_runs as check_runs
from ._step_law import StepLaw as StepLaw
