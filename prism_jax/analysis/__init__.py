from ._check import (
    check_num_steps as check_num_steps,
    check_objective as check_objective,
    check_reached as check_reached,
    check_steps as check_steps,
)
from ._criticality import (
    Criticality as Criticality,
    criticality as criticality,
    exposed_data_parallel as exposed_data_parallel,
    levels_of as levels_of,
)
from ._estimate import estimate as estimate, step_times as step_times
from ._fit import Fit as Fit, fit_parameters as fit_parameters
from ._improve import (
    Improvement as Improvement,
    Target as Target,
    improve as improve,
    target as target,
)
from ._jackknife import (
    Jackknifed as Jackknifed,
    combined as combined,
    jackknifed as jackknifed,
)
from ._knobs import ranks_of_stages as ranks_of_stages
from ._measured import CRPS as CRPS, Score as Score, Wasserstein as Wasserstein, score as score
from ._objectives import (
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
    bandwidth as bandwidth,
)
from ._sample_step import SampledStep as SampledStep, sample_step as sample_step
from ._sensitivity import Part as Part, Sensitivity as Sensitivity, sensitivity as sensitivity
from ._sliders import (
    LEVELS as LEVELS,
    P95 as P95,
    SHARED as SHARED,
    AbstractSlider as AbstractSlider,
    Rare as Rare,
    Sliders as Sliders,
    moved as moved,
    slider_parameters as slider_parameters,
    sliders as sliders,
)
from ._sweep import (
    Points as Points,
    alike as alike,
    open_parts as open_parts,
    sweep as sweep,
    sweep_points as sweep_points,
    write_part as write_part,
)
from ._whatif import (
    Scenario as Scenario,
    WhatIf as WhatIf,
    scale_kernel as scale_kernel,
    slow_rank as slow_rank,
    what_if as what_if,
)
