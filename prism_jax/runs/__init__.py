from ._cycles import RunCosts as RunCosts, check_costs as check_costs
from ._run_law import (
    RunLaw as RunLaw,
    best_interval as best_interval,
    waiting_share as waiting_share,
)
from ._training_run import training_run as training_run
