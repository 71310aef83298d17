from ._base import (
    AbstractLatency as AbstractLatency,
    InFiles as InFiles,
    ParameterRule as ParameterRule,
    check as check,
)
from ._constant import Constant as Constant
from ._empirical import Empirical as Empirical, empirical_from_samples as empirical_from_samples
from ._families import (
    families as families,
    fit_latency as fit_latency,
    make_latency as make_latency,
)
from ._gamma import Gamma as Gamma
from ._lognormal import LogNormal as LogNormal, ShiftedLogNormal as ShiftedLogNormal
from ._mixture import Mixture as Mixture
from ._normal import Normal as Normal
from ._outlying import Outlying as Outlying
from ._scores import (
    log_density as log_density,
    normal_nodes as normal_nodes,
    score_of_maximum as score_of_maximum,
)
from ._three_moment import (
    ThreeMoment as ThreeMoment,
    cube_normal as cube_normal,
    cube_normal_score as cube_normal_score,
    least_std as least_std,
    moments_of as moments_of,
    root as root,
    shape_of as shape_of,
)
from ._transform import (
    Scaled as Scaled,
    Shifted as Shifted,
    log_sigma as log_sigma,
    scale_spread as scale_spread,
)
from ._weibull import Weibull as Weibull
