from ._estimate import estimate as estimate
from ._fit import fit_profile as fit_profile
from ._objectives import (
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
)
from ._score import Score as Score, crps as crps, ks_distance as ks_distance, score as score
from ._sweep import sweep as sweep, sweep_points as sweep_points
