from ._check import check_num_samples as check_num_samples, check_program as check_program
from ._critical_paths import (
    critical_paths as critical_paths,
    exposed_reductions as exposed_reductions,
)
from ._explicit import gpu_set_factors as gpu_set_factors
from ._gradient import Weighting as Weighting, pull_back as pull_back
from ._pilot import vector_rule_notes as vector_rule_notes
from ._run import Run as Run, prepare as prepare
from ._sampling import Plain as Plain
from ._simulate import simulate as simulate
from ._simulated_steps import (
    Again as Again,
    SimulatedSteps as SimulatedSteps,
    conditional_exceedances as conditional_exceedances,
    last_draw as last_draw,
    resample as resample,
    simulated_steps as simulated_steps,
    step_parts_of as step_parts_of,
    steps_of_run as steps_of_run,
    support as support,
)
