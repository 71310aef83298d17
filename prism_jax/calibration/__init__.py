from ._calibrate import calibrate as calibrate
from ._epistemic import (
    STEP_LEVELS as STEP_LEVELS,
    Epistemic as Epistemic,
    epistemic as epistemic,
    level_of_runs as level_of_runs,
    possible_runs as possible_runs,
)
from ._observe import StepLaw as StepLaw, check_runs as check_runs
from ._scale import agreement as agreement, with_calibrated as with_calibrated
