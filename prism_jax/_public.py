"""The public names, from where they are made."""

from . import latency as latency, plot as plot, report as report
from ._cache import keep_compiled as keep_compiled
from ._estimate import Estimate as Estimate
from .analysis import (
    CRPS as CRPS,
    AbstractObjective as AbstractObjective,
    Criticality as Criticality,
    CVaR as CVaR,
    Exceedance as Exceedance,
    Improvement as Improvement,
    Mean as Mean,
    Quantile as Quantile,
    SampledStep as SampledStep,
    Scenario as Scenario,
    Score as Score,
    Sensitivity as Sensitivity,
    Std as Std,
    Target as Target,
    WhatIf as WhatIf,
    criticality as criticality,
    estimate as estimate,
    improve as improve,
    sample_step as sample_step,
    scale_kernel as scale_kernel,
    score as score,
    sensitivity as sensitivity,
    slow_rank as slow_rank,
    sweep as sweep,
    target as target,
    what_if as what_if,
)
from .calibration import calibrate as calibrate
from .data import (
    Cause as Cause,
    Cluster as Cluster,
    Device as Device,
    Failures as Failures,
    Job as Job,
    Kernels as Kernels,
    Layout as Layout,
    Model as Model,
    ScheduleConfig as ScheduleConfig,
    Training as Training,
    load_cluster as load_cluster,
    load_device as load_device,
    load_failures as load_failures,
    load_job as load_job,
    load_model as load_model,
    save_job as save_job,
)
from .engine import simulate as simulate
from .law import (
    Law as Law,
    load_law as load_law,
    merge_laws as merge_laws,
    save_law as save_law,
)
from .layouts import (
    LayoutSpace as LayoutSpace,
    RankedLayout as RankedLayout,
    Ranking as Ranking,
    enumerate_layouts as enumerate_layouts,
    rank_layouts as rank_layouts,
)
from .placement import Placement as Placement, place as place
from .prediction import (
    Memory as Memory,
    Prediction as Prediction,
    memory as memory,
    predict as predict,
)
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
    Stall as Stall,
    Variability as Variability,
    compile_graph as compile_graph,
    compile_job as compile_job,
    compile_program as compile_program,
    load_program as load_program,
    save_program as save_program,
)
from .replica import sample_replica_ends as sample_replica_ends
from .runs import RunCosts as RunCosts, RunLaw as RunLaw, training_run as training_run
from .schedule import (
    ZBH1 as ZBH1,
    ZBH2 as ZBH2,
    ZBV as ZBV,
    AbstractSchedule as AbstractSchedule,
    Chimera as Chimera,
    CustomSchedule as CustomSchedule,
    DualPipe as DualPipe,
    DualPipeV as DualPipeV,
    GPipe as GPipe,
    Hanayo as Hanayo,
    InterleavedOneFOneB as InterleavedOneFOneB,
    InterleavedZeroBubble as InterleavedZeroBubble,
    LoopedBFS as LoopedBFS,
    OneFOneB as OneFOneB,
    OverlappedOneFOneB as OverlappedOneFOneB,
    Repeated as Repeated,
    Timeline as Timeline,
    VHalf as VHalf,
    VMin as VMin,
    ZBGreedy as ZBGreedy,
    evaluate as evaluate,
    load_schedule as load_schedule,
    peak_in_flight as peak_in_flight,
    save_schedule as save_schedule,
)
from .trace import Trace as Trace, read_step_times as read_step_times, read_trace as read_trace
from .workers import RayExecutor as RayExecutor, prepare_worker as prepare_worker
