from ._estimate import estimate as estimate
from ._objectives import (
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
)
from ._sweep import sweep as sweep, sweep_points as sweep_points
