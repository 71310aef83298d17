"""`prism-jax score`: compares a job or profile with measured step times."""

import argparse
import math
from typing import Any

from .._files import shown
from .._misc import counted
from ._arguments import add_job_arguments, add_steps_argument


HELP = "compare the predicted law of the step time with measured step times"

_LEGEND = """\
mean_error, p95_error: predicted over measured, minus one; std_ratio: predicted over measured
ks: the Kolmogorov-Smirnov distance; ks_aligned: the same after the medians are made equal
w1_s, crps_s: the Wasserstein-1 distance and the continuous ranked probability score, in seconds
coverage_90: the share of measured steps between the predicted p5 and p95
noise: the scatter of the figure by chance, given the number of measured steps"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--against",
        required=True,
        metavar="STEP_TIMES",
        help="measured step times: a .csv or .parquet file with a column `step_time_s`",
    )
    add_steps_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..trace import read_step_times
    from ._load import compiled, load, tell_unit

    given = read_step_times(arguments.against)
    measured = given[arguments.steps]
    if len(measured) < 2:
        raise ValueError(
            f"{shown(arguments.against)}: {counted(len(measured), 'step')} of {len(given)} left "
            "to score against; give at least two steps, and a `--steps` that keeps them."
        )
    loaded = load(arguments)

    import numpy as np

    from ..analysis import score
    from ..engine import simulate

    program, options = compiled(arguments, loaded)
    law = simulate(program, **options)
    tell_unit(arguments.against, float(np.median(measured)), float(law.quantile(0.5)))
    found = score(law, measured, key=options["key"])
    result: dict[str, Any] = {"name": loaded.name, "num_steps": found.num_steps}
    lines = [f"{loaded.name} against {found.num_steps} measured steps", ""]
    lines.append(f"{'':<14} {'value':>10}   {'noise':>10}")
    for name, value in found.values.items():
        # A ratio to the spread of measured steps that are all equal is not defined.
        pair = {"value": value, "noise": found.noise[name]}
        result[name] = {k: x if math.isfinite(x) else None for k, x in pair.items()}
        value, noise = (f"{x:.4g}" if math.isfinite(x) else "-" for x in pair.values())
        lines.append(f"{name:<14} {value:>10}   {noise:>10}")
    lines += ["", _LEGEND]
    return result, "\n".join(lines)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each score."""
    return [{"score": k, **v} for k, v in result.items() if isinstance(v, dict)]
