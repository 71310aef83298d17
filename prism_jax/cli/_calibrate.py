"""`prism-jax calibrate`: a job whose law agrees with measured step times."""

import argparse
import os
from typing import Any

from .._files import shown
from ._arguments import add_progress_argument, add_seed_argument, add_set_argument
from ._devices import use_all_cores


HELP = "calibrate a job to measured step times, so that it predicts other scales"


_LEVEL = {
    "compute": "compute takes this many times as long",
    "network": "collectives between nodes take this many times as long",
    "constant_s": "seconds added to each step",
    "growth": "compute takes (replicas)^this times as long",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a shipped job (`prism-jax jobs`) or a .toml file; not needed if each --to has a "
        "--job",
    )
    parser.add_argument(
        "--to",
        required=True,
        action="append",
        metavar="STEP_TIMES",
        help="measured step times in the order of steps: a .csv or .parquet file with a column "
        "`step_time_s`, and a column `run` if there are several runs; can be repeated, each with "
        "the --job that was measured",
    )
    parser.add_argument(
        "--job",
        dest="jobs",
        action="append",
        default=[],
        metavar="JOB",
        help="the job of each --to, in the same order: on the same software and machine, at "
        "another scale or in another layout; the first is calibrated and written",
    )
    parser.add_argument("--out", required=True, metavar="JOB2", help="the .toml file to write")
    add_seed_argument(parser)
    add_set_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import check_job_path, is_profile, load_job, save_job
    from ..trace import read_runs

    names = _jobs(arguments)
    for name in names:
        if is_profile(name):
            raise ValueError(
                f"{shown(name)}: this is a profile, which is fitted already; give a job."
            )
    jobs = [load_job(name, arguments.overrides) for name in names]
    all_runs = [read_runs(path) for path in arguments.to]
    check_job_path(arguments.out)
    if os.path.exists(arguments.out) and not _is_calibrated(arguments.out):
        raise ValueError(
            f"{shown(arguments.out)}: a file is there that this command did not write; give "
            "another name."
        )

    import jax
    import numpy as np

    from ..calibration import agreement, calibrate, calibrated_as, check_runs
    from ..prediction import predict
    from ._load import tell_notes, tell_unit, wants_progress

    for path, runs in zip(arguments.to, all_runs, strict=True):
        check_runs(runs, f"{shown(path)}: ")
    for path, runs, one in zip(arguments.to, all_runs, jobs, strict=True):
        if one.model is not None and one.cluster is not None:
            tell_unit(path, float(np.median(np.concatenate(runs))), predict(one).mean)
    use_all_cores()
    files = ", ".join(os.path.basename(path) for path in arguments.to)
    job = calibrate(
        jobs[0],
        all_runs[0],
        source=f"calibrated to {files}",
        key=jax.random.key(arguments.seed),
        others=list(zip(jobs[1:], all_runs[1:], strict=True)),
        progress=wants_progress(arguments),
    )
    save_job(job, arguments.out)
    tell_notes([job])
    result = {
        "job": arguments.out,
        "num_steps": sum(len(run) for runs in all_runs for run in runs),
        "num_runs": sum(map(len, all_runs)),
        **_calibrated(job),
        "agreement": agreement(job, all_runs[0]),
        "agreement_of_others": [
            {"job": name, "to": path, **agreement(calibrated_as(one, job), runs)}
            for name, path, one, runs in zip(
                names[1:], arguments.to[1:], jobs[1:], all_runs[1:], strict=True
            )
        ],
    }
    return result, _text(result, arguments.to[0])


def _jobs(arguments: argparse.Namespace) -> list[str]:
    """The job of each file of step times."""
    names = [*([] if arguments.job is None else [arguments.job]), *arguments.jobs]
    if len(names) != len(arguments.to):
        raise ValueError(
            f"There are {len(names)} jobs for {len(arguments.to)} files of step times; give each "
            "--to one --job, or the first the JOB."
        )
    return names


def _calibrated(job: Any) -> dict[str, Any]:
    """The calibrated values, as numbers."""
    from ..data import LEVEL

    found = job.calibrated
    errors = [found.uncertainty.covariance[i][i] ** 0.5 for i in range(len(LEVEL))]
    # The uncertainty of the two factors is that of their logarithms.
    level = {name: getattr(found, name) for name in LEVEL}
    errors = [e * level[n] if n in LEVEL[:2] else e for n, e in zip(LEVEL, errors, strict=True)]
    rows = [
        {"kernel": v.kernel, "component": v.component, "family": v.family, **v.parameters}
        for v in found.variability
    ]
    return {
        **level,
        "standard_errors": dict(zip(LEVEL, errors, strict=True)),
        "prior": list(found.uncertainty.prior),
        "variability": rows,
    }


def _text(result: dict[str, Any], first: str) -> str:
    out, number, runs = result["job"], result["num_steps"], result["num_runs"]
    lines = [f"{out}: calibrated to {number:,} steps of {runs} run(s)", ""]
    for name, what in _LEVEL.items():
        error = result["standard_errors"][name]
        prior = " (prior)" if name in result["prior"] else ""
        lines.append(f"{name:<12}{result[name]:>9.4g} +- {error:<8.2g} {what}{prior}")
    if result["prior"]:
        lines.append(
            "(prior): mostly from other systems, because these steps determine little of it; runs "
            "at other scales would"
        )
    lines.append("")
    for v in result["variability"]:
        numbers = {k: x for k, x in v.items() if k not in ("kernel", "component", "family")}
        parameters = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        line = f"{v['kernel'] or 'all':<15} {v['component']:<11} {v['family']:<18} {parameters}"
        lines.append(line.rstrip())
    lines += ["", f"{'steps of one run':<27}{'calibrated':>12}{'measured':>12}"]
    others = result["agreement_of_others"]
    for figures in ({"to": first, **result["agreement"]}, *others):
        lines += [f"{figures['to']}:"] if others else []
        pairs = [(name, pair) for name, pair in figures.items() if name not in ("job", "to")]
        lines += [f"{name:<27}{ours:>12.5g}{theirs:>12.5g}" for name, (ours, theirs) in pairs]
    return "\n".join(lines)


def _is_calibrated(path: str) -> bool:
    """Whether a file is one that this command wrote."""
    from ..data import read_toml

    try:
        return "calibrated" in read_toml(path, "job")
    except ValueError:
        return False
