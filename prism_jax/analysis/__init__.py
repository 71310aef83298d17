from ._bootstrap import (
    MARGIN as MARGIN,
    Bootstrapped as Bootstrapped,
    bootstrapped as bootstrapped,
    check_num_steps as check_num_steps,
    combined as combined,
)
from ._check import (
    check_objective as check_objective,
    check_reached as check_reached,
    check_steps as check_steps,
)
from ._criticality import Criticality as Criticality, criticality as criticality
from ._density import bandwidth as bandwidth
from ._estimate import estimate as estimate
from ._exposed import exposed_data_parallel as exposed_data_parallel
from ._improve import Improvement as Improvement, improve as improve
from ._objectives import (
    AbstractObjective as AbstractObjective,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Std as Std,
)
from ._objectives_of_measured import CRPS as CRPS, Wasserstein as Wasserstein
from ._parts import open_parts as open_parts, write_part as write_part
from ._sample_step import SampledStep as SampledStep, sample_step as sample_step
from ._score import Score as Score, score as score
from ._sensitivity import Part as Part, Sensitivity as Sensitivity, sensitivity as sensitivity
from ._sliders import (
    LEVELS as LEVELS,
    P50 as P50,
    P95 as P95,
    SHARED as SHARED,
    AbstractSlider as AbstractSlider,
    Check as Check,
    Rare as Rare,
    Sliders as Sliders,
    Smooth as Smooth,
    moved as moved,
    sliders as sliders,
)
from ._stages import ranks_of_stages as ranks_of_stages
from ._sweep import (
    Points as Points,
    alike as alike,
    grid as grid,
    sweep as sweep,
    sweep_points as sweep_points,
)
from ._target import Target as Target, target as target
from ._whatif import (
    Scenario as Scenario,
    WhatIf as WhatIf,
    scale_kernel as scale_kernel,
    slow_rank as slow_rank,
    what_if as what_if,
)
