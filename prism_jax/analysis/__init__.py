from ._criticality import Criticality as Criticality, criticality as criticality
from ._estimate import estimate as estimate
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
    check_objective as check_objective,
    check_reached as check_reached,
    check_steps as check_steps,
)
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
