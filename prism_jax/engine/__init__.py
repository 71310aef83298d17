from ._check import check_num_samples as check_num_samples, check_program as check_program
from ._critical_paths import (
    critical_paths as critical_paths,
    exposed_reductions as exposed_reductions,
)
from ._explicit import gpu_set_factors as gpu_set_factors
from ._gradient import (
    Derivatives as Derivatives,
    through_paths as through_paths,
    through_weights as through_weights,
)
from ._run import Run as Run, prepare as prepare
from ._simulate import simulate as simulate
from ._simulated_steps import (
    SimulatedSteps as SimulatedSteps,
    conditional_exceedances as conditional_exceedances,
    last_draw as last_draw,
    simulated_steps as simulated_steps,
    steps_of_run as steps_of_run,
    support as support,
)
from ._together import simulate_each as simulate_each
