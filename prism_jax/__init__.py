"""The distribution of a training step's time, and which kernels' variability makes it wide.

Functions, in the order in which one needs them; `help(prism_jax.simulate)` tells more of one:

- `load_job(name, overrides)`: a job, shipped or from a file; `save_job` writes one.
- `predict(job)`: the step if nothing varied; `memory(job)`: what a rank needs.
- `compile_job(job)`, `compile_graph(ops)`: the program of a step.
- `simulate(program, key=key)`: the law of its time; `step_times(program, n, key=key)`: the times.
- `sensitivity(program, Quantile(0.95), key=key)`: what p95 depends on; `estimate`: its derivative.
- `criticality`, `what_if`, `improve`, `sweep`: what is critical, and what changes would do.
- `rank_layouts(jobs)`, `place(program, factors)`: the best layout, and which node where.
- `training_run(program)`: how long a whole run takes.
- `read_step_times`, `read_log`, `read_trace`: what was measured.
- `fit_profile`, `calibrate`, `score`: laws of what was measured.
- `fit_parameters(program, CRPS(steps), where, key=key)`: parameters that explain measured steps.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from . import (
        analysis as analysis,
        calibration as calibration,
        cluster as cluster,
        diagnosis as diagnosis,
        engine as engine,
        importers as importers,
        law as law,
        layouts as layouts,
        logs as logs,
        lowering as lowering,
        measure as measure,
        placement as placement,
        prediction as prediction,
        profile as profile,
        program as program,
        runs as runs,
        trace as trace,
        workload as workload,
    )
    from ._public import *  # noqa: F403
    from .schedules import *  # noqa: F403

    __version__: str


# Imported when first asked for: the command line needs little of it, and can be interrupted only
# once its own handler is there.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("prism-jax")
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    if importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    # Schedules are names of the package, too, such as `prism.OneFOneB`; `dir` leaves them out.
    for module in ("_public", "schedules"):
        public = importlib.import_module(f"{__name__}.{module}")
        if hasattr(public, name):
            return getattr(public, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


def __dir__() -> list[str]:
    public = importlib.import_module(f"{__name__}._public")
    return sorted(name for name in vars(public) if not name.startswith("_"))
