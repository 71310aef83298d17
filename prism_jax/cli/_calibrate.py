"""`prism-jax calibrate`: a job whose law agrees with measured step times."""

import argparse
import os
from typing import Any

from .._files import shown
from ._arguments import add_progress_argument, add_seed_argument, add_set_argument
from ._devices import use_all_cores


HELP = "calibrate a job to the step times of a run, to predict other scales with it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", help="a shipped job (`prism-jax jobs`) or a .toml file"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="STEP_TIMES",
        help="measured step times in their order: a .csv or .parquet file with a column "
        "`step_time_s`, and `run` where there are several",
    )
    parser.add_argument("--out", required=True, metavar="JOB2", help="the .toml file to write")
    add_seed_argument(parser)
    add_set_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import check_job_path, is_profile, load_job, save_job
    from ..trace import read_runs

    if is_profile(arguments.job):
        raise ValueError(
            f"{shown(arguments.job)}: this is a profile, which is fitted already; give a job."
        )
    job = load_job(arguments.job, arguments.overrides)
    runs = read_runs(arguments.to)
    check_job_path(arguments.out)
    if os.path.exists(arguments.out) and not _is_calibrated(arguments.out):
        raise ValueError(
            f"{shown(arguments.out)}: a file is there that this command did not write; give "
            "another name."
        )

    import jax

    from ..fitting import agreement, calibrate
    from ._load import tell_notes, wants_progress

    use_all_cores()
    job = calibrate(
        job,
        runs,
        source=f"calibrated to {os.path.basename(arguments.to)}",
        key=jax.random.key(arguments.seed),
        progress=wants_progress(arguments),
    )
    save_job(job, arguments.out)
    tell_notes([job])
    assert job.calibrated is not None
    rows = [
        {"kernel": v.kernel, "component": v.component, "family": v.family, **v.parameters}
        for v in job.calibrated.variability
    ]
    number = sum(map(len, runs))
    figures = agreement(job, runs)
    result = {
        "job": arguments.out,
        "num_steps": number,
        "num_runs": len(runs),
        "compute": job.calibrated.compute,
        "variability": rows,
        "agreement": figures,
    }
    lines = [f"{arguments.out}: calibrated to {number:,} steps of {len(runs)} run(s)", ""]
    lines.append(f"compute takes {job.calibrated.compute:.4g} times as long")
    for v in job.calibrated.variability:
        parameters = ", ".join(f"{name} {value:.3g}" for name, value in v.parameters.items())
        lines.append(f"{v.kernel or 'all':<15} {v.component:<11} {v.family:<18} {parameters}")
    lines += ["", f"{'of the steps of one run':<27}{'calibrated':>12}{'measured':>12}"]
    lines += [f"{name:<27}{ours:>12.5g}{theirs:>12.5g}" for name, (ours, theirs) in figures.items()]
    return result, "\n".join(lines)


def _is_calibrated(path: str) -> bool:
    """Whether a file is what this command writes."""
    from ..data import read_toml

    try:
        return "calibrated" in read_toml(path, "job")
    except ValueError:
        return False
