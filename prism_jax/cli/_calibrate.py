"""`prism-jax calibrate`: a job whose law agrees with measured step times."""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from .._estimate import Estimate
from .._files import shown
from .._summary import Column, Table
from . import _load
from ._command import Output, argument, command, repeated
from ._options import PROGRESS, SEED, SET


_LEVEL = {
    "compute": "compute takes this many times as long",
    "network": "collectives between nodes take this many times as long",
    "constant_s": "seconds added to each step",
    "growth": "compute takes (replicas)^this times as long",
}


@command(
    "calibrate a job to measured step times, so that it predicts other scales",
    "job.toml --to step_times.csv --out mine.toml",
    argument(
        "job",
        "JOB",
        "a shipped job (`prism-jax jobs`) or a .toml file; not needed if each --to has a --job",
        nargs="?",
    ),
    repeated(
        "--to",
        "STEP_TIMES",
        "measured step times in the order of steps: a .csv or .parquet file with a column "
        "`step_time_s`, and a column `run` if there are several runs; can be repeated, each with "
        "the --job that was measured",
        required=True,
    ),
    repeated(
        "--job",
        "JOB",
        "the job of each --to, in the same order: on the same software and machine, at another "
        "scale or in another layout; the first is calibrated and written",
        dest="jobs",
    ),
    argument("--out", "JOB2", "the .toml file to write", required=True),
    SEED,
    SET,
    PROGRESS,
)
def run(arguments: argparse.Namespace) -> Output:
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

    from ..fitting import agreement, calibrate, calibrated_as, check_runs
    from ..prediction import predict

    for path, runs in zip(arguments.to, all_runs, strict=True):
        check_runs(runs, f"{shown(path)}: ")
    for path, runs, one in zip(arguments.to, all_runs, jobs, strict=True):
        if one.model is not None and one.cluster is not None:
            _load.tell_unit(path, float(np.median(np.concatenate(runs))), predict(one).mean)
    _load.use_all_cores()
    files = ", ".join(os.path.basename(path) for path in arguments.to)
    job = calibrate(
        jobs[0],
        all_runs[0],
        source=f"calibrated to {files}",
        key=jax.random.key(arguments.seed),
        others=list(zip(jobs[1:], all_runs[1:], strict=True)),
        progress=_load.wants_progress(arguments),
    )
    save_job(job, arguments.out)
    _load.tell_notes([job])
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
    return Output(result, [*_blocks(result, arguments.to[0])])


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


def _blocks(result: dict[str, Any], first: str) -> Iterator[Table | str]:
    out, number, runs = result["job"], result["num_steps"], result["num_runs"]
    prior = (
        "(prior): mostly from other systems, because these steps determine little of it; runs "
        "at other scales would",
    ) * bool(result["prior"])
    rows = [
        {
            "name": name,
            "value": Estimate(result[name], result["standard_errors"][name]),
            "what": f"{what}{' (prior)' * (name in result['prior'])}",
        }
        for name, what in _LEVEL.items()
    ]
    title = f"{out}: calibrated to {number:,} steps of {runs} run(s)"
    yield Table((Column("level", "name"), "value", Column("", "what")), rows, title, prior)
    columns = (
        Column("kernel", lambda law: law["kernel"] or "all"),
        "component",
        "family",
        Column("parameters", _parameters),
    )
    yield Table(columns, result["variability"], most=None)
    others = result["agreement_of_others"]
    rows = [
        {"of": figures["to"], "figure": name, "ours": pair[0], "theirs": pair[1]}
        for figures in ({"to": first, **result["agreement"]}, *others)
        for name, pair in figures.items()
        if name not in ("job", "to")
    ]
    columns = (
        *[Column("steps", "of")] * bool(others),
        Column("of one run", "figure"),
        Column("calibrated", "ours", ".5g"),
        Column("measured", "theirs", ".5g"),
    )
    yield Table(columns, rows, most=None)


def _parameters(law: dict[str, Any]) -> str:
    numbers = {k: x for k, x in law.items() if k not in ("kernel", "component", "family")}
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


def _is_calibrated(path: str) -> bool:
    """Whether a file is one that this command wrote."""
    from ..data import read_toml

    try:
        return "calibrated" in read_toml(path, "job")
    except ValueError:
        return False
