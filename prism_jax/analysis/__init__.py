from ._calibrate import agreement as agreement, calibrate as calibrate
from ._components import components as components, fit_components as fit_components
from ._criticality import Criticality as Criticality, criticality as criticality
from ._estimate import estimate as estimate
from ._fit import fit_profile as fit_profile
from ._improve import (
    Improvement as Improvement,
    Target as Target,
    improve as improve,
    spread_for as spread_for,
)
from ._objectives import (
    CRPS as CRPS,
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
)
from ._observe import Observed as Observed, core_spread as core_spread, observe as observe
from ._placement import Placement as Placement, place as place
from ._score import Score as Score, crps as crps, ks_distance as ks_distance, score as score
from ._sensitivity import Part as Part, Sensitivity as Sensitivity, sensitivity as sensitivity
from ._sweep import sweep as sweep, sweep_points as sweep_points
from ._whatif import (
    Scenario as Scenario,
    WhatIf as WhatIf,
    faster as faster,
    slow_rank as slow_rank,
    what_if as what_if,
)
