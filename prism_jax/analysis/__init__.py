from ._calibrate import Observed as Observed, calibrate as calibrate, observe as observe
from ._components import components as components, fit_components as fit_components
from ._estimate import estimate as estimate
from ._fit import fit_profile as fit_profile
from ._objectives import (
    CRPS as CRPS,
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
)
from ._score import Score as Score, crps as crps, ks_distance as ks_distance, score as score
from ._sweep import sweep as sweep, sweep_points as sweep_points
