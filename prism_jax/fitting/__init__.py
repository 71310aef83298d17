from ._agreement import agreement as agreement
from ._calibrate import calibrate as calibrate
from ._calibrated_job import calibrated_as as calibrated_as
from ._components import components as components
from ._epistemic import Epistemic as Epistemic, epistemic as epistemic
from ._fit import fit_profile as fit_profile
from ._ladder import Rung as Rung, ladder as ladder
from ._observe import (
    Observed as Observed,
    check_runs as check_runs,
    core_spread as core_spread,
    observe as observe,
)
from ._self_test import shuffled_means as shuffled_means
