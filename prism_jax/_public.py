"""The public names, from where they are made."""

from . import (
    latency as latency,
    plot as plot,
    report as report,
    schedules as schedules,
    workers as workers,
)
from ._cache import keep_compiled as keep_compiled
from ._estimate import Estimate as Estimate
from ._misc import OutOfMemoryWarning as OutOfMemoryWarning
from .analysis import (
    CRPS as CRPS,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Mean as Mean,
    Quantile as Quantile,
    Scenario as Scenario,
    Std as Std,
    Wasserstein as Wasserstein,
    criticality as criticality,
    estimate as estimate,
    fit_parameters as fit_parameters,
    improve as improve,
    sample_step as sample_step,
    scale_kernel as scale_kernel,
    score as score,
    sensitivity as sensitivity,
    slow_rank as slow_rank,
    step_times as step_times,
    sweep as sweep,
    target as target,
    what_if as what_if,
)
from .calibration import calibrate as calibrate
from .data import (
    Job as Job,
    Layout as Layout,
    load_cluster as load_cluster,
    load_failures as load_failures,
    load_job as load_job,
    load_model as load_model,
    save_job as save_job,
)
from .engine import simulate as simulate
from .explorer import explore as explore
from .law import (
    Law as Law,
    load_law as load_law,
    merge_laws as merge_laws,
    save_law as save_law,
    wasserstein as wasserstein,
)
from .layouts import (
    LayoutSpace as LayoutSpace,
    enumerate_layouts as enumerate_layouts,
    rank_layouts as rank_layouts,
)
from .logs import read_log as read_log
from .placement import place as place
from .prediction import expected_error as expected_error, memory as memory, predict as predict
from .profile import (
    Profile as Profile,
    compile_profile as compile_profile,
    fit_profile as fit_profile,
    load_profile as load_profile,
    save_profile as save_profile,
)
from .program import (
    Network as Network,
    Op as Op,
    Program as Program,
    SharedNetwork as SharedNetwork,
    Stall as Stall,
    Variability as Variability,
    compile_graph as compile_graph,
    compile_job as compile_job,
    compile_program as compile_program,
    load_program as load_program,
    save_program as save_program,
)
from .replica import sample_replica_ends as sample_replica_ends
from .runs import training_run as training_run
from .schedule import (
    CustomSchedule as CustomSchedule,
    evaluate as evaluate,
    load_schedule as load_schedule,
    save_schedule as save_schedule,
)
from .trace import read_step_times as read_step_times, read_trace as read_trace
