from ._calibrate import agreement as agreement, calibrate as calibrate
from ._components import components as components, fit_components as fit_components
from ._fit import fit_profile as fit_profile
from ._observe import Observed as Observed, core_spread as core_spread, observe as observe
