from ._compile import compile_profile as compile_profile
from ._components import components as components
from ._fit import fit_profile as fit_profile
from ._ladder import Rung as Rung, ladder as ladder
from ._notes import shuffled_means as shuffled_means
from ._profile import (
    Component as Component,
    Fitted as Fitted,
    PositionFactor as PositionFactor,
    Profile as Profile,
    WorkerMean as WorkerMean,
    load_profile as load_profile,
    save_profile as save_profile,
)
