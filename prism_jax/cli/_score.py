from .._files import shown
from .._misc import counted
from .._summary import plain
from . import _load
from ._options import SIMULATED, STEPS, Given, Output, argument, command


_LEGEND = """\
mean_error, p95_error: predicted over measured, minus one; std_ratio: predicted over measured
ks: the Kolmogorov-Smirnov distance; ks_aligned: the same after the medians are made equal
w1_s, crps_s: the Wasserstein-1 distance and the continuous ranked probability score, in seconds
coverage_90: the share of measured steps between the predicted p5 and p95
noise: the scatter of the figure by chance, given the number of measured steps"""


@command(
    "mine.toml --against step_times.csv",
    *SIMULATED,
    argument(
        "--against STEP_TIMES",
        "measured step times: a .csv or .parquet file with a column `step_time_s`",
        required=True,
    ),
    STEPS,
    csv=True,
)
def run(given: Given) -> Output:
    """Compare the predicted law of the step time with measured step times."""
    from ..trace import read_step_times

    steps = read_step_times(given.against)
    measured = steps[given.steps]
    if len(measured) < 2:
        raise ValueError(
            f"{shown(given.against)}: {counted(len(measured), 'step')} of {len(steps)} left to "
            "score against; give at least two steps, and a `--steps` that keeps them."
        )
    loaded = _load.load(given)

    import numpy as np

    from ..analysis import score
    from ..engine import simulate

    program, options = _load.compiled(given, loaded)
    law = simulate(program, **options)
    _load.tell_unit(given.against, float(np.median(measured)), float(law.quantile(0.5)))
    found = score(law, measured, key=options["key"])
    table = found.summary().named(loaded.name)
    result = {"name": loaded.name, "num_steps": found.num_steps}
    # A ratio to the spread of measured steps that are all equal is not defined.
    result |= {row.pop("score"): row for row in plain(table.rows)}
    return Output(result, [table, _LEGEND])
