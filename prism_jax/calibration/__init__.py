from ._agreement import agreement as agreement
from ._calibrate import calibrate as calibrate
from ._calibrated_job import calibrated_as as calibrated_as
from ._epistemic import Epistemic as Epistemic, epistemic as epistemic
from ._observe import (
    Observed as Observed,
    check_runs as check_runs,
    core_spread as core_spread,
    observe as observe,
)
