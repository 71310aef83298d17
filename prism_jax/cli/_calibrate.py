import contextlib
import dataclasses
import os
from typing import Any

from .._files import shown
from .._summary import Column, Table, picked
from ..data import check_job_path, is_profile, law_table, load_job, read_toml, save_job
from . import _load
from ._options import RANDOM, Given, Output, argument, command, repeated


@command(
    "job.toml --to step_times.csv --out mine.toml",
    argument(
        "job JOB",
        "a shipped job (`prism-jax jobs`) or a .toml file; not needed if each --to has a --job",
        nargs="?",
    ),
    repeated(
        "--to STEP_TIMES",
        "measured step times in the order of steps: a .csv or .parquet file with a column "
        "`step_time_s`, and a column `run` if there are several runs; can be repeated, each with "
        "the --job that was measured",
        required=True,
    ),
    repeated(
        "--job JOB",
        "the job of each --to, in the same order: on the same software and machine, at another "
        "scale or in another layout; the first is calibrated and written",
        dest="jobs",
    ),
    argument("--out JOB2", "the .toml file to write", required=True),
    *RANDOM,
)
def run(given: Given) -> Output:
    """Calibrate a job to measured step times, so that it predicts other scales."""
    from ..trace import read_runs

    names = [*[given.job] * (given.job is not None), *given.jobs]
    if len(names) != len(given.to):
        raise ValueError(
            f"There are {len(names)} jobs for {len(given.to)} files of step times; give each --to "
            "one --job, or the first the JOB."
        )
    for name in filter(is_profile, names):
        raise ValueError(f"{shown(name)}: this is a profile, which is fitted already; give a job.")
    jobs = [load_job(name, given.overrides) for name in names]
    all_runs = [read_runs(path) for path in given.to]
    check_job_path(given.out)
    if os.path.exists(given.out) and not _is_calibrated(given.out):
        what = "a file is there that this command did not write; give another name"
        raise ValueError(f"{shown(given.out)}: {what}.")

    import jax
    import numpy as np

    from ..calibration import agreement, calibrate, calibrated_as, check_runs
    from ..prediction import predict

    for path, runs in zip(given.to, all_runs, strict=True):
        check_runs(runs, f"{shown(path)}: ")
    for path, runs, one in zip(given.to, all_runs, jobs, strict=True):
        if one.model is not None and one.cluster is not None:
            _load.tell_unit(path, float(np.median(np.concatenate(runs))), predict(one).mean)
    _load.use_all_cores()
    job = calibrate(
        jobs[0],
        all_runs[0],
        source=f"calibrated to {', '.join(map(os.path.basename, given.to))}",
        key=jax.random.key(given.seed),
        others=list(zip(jobs[1:], all_runs[1:], strict=True)),
        progress=_load.wants_progress(given),
    )
    save_job(job, given.out)
    found = job.calibrated
    assert found is not None
    _load.tell_notes([job])
    law_of = ("kernel", "component", "family")
    result = {
        "job": given.out,
        "num_steps": sum(len(run) for runs in all_runs for run in runs),
        "num_runs": sum(map(len, all_runs)),
        **{name: figure.value for name, figure in found.level.items()},
        "standard_errors": {name: figure.standard_error for name, figure in found.level.items()},
        **picked(found.uncertainty, "prior"),
        "variability": [picked(law, *law_of) | law.parameters for law in found.variability],
        "agreement": agreement(job, all_runs[0]),
        "agreement_of_others": [
            {"job": name, "to": path, **agreement(calibrated_as(one, job), runs)}
            for name, path, one, runs in [*zip(names, given.to, jobs, all_runs, strict=True)][1:]
        ],
    }
    what = f"calibrated to {result['num_steps']:,} steps of {result['num_runs']} run(s)"
    level = dataclasses.replace(found.summary(), title=f"{given.out}: {what}")
    return Output(result, [level, law_table(found.variability), _agreement(result, given.to[0])])


def _agreement(result: dict[str, Any], first: str) -> Table:
    """Figures of the calibrated steps beside the measured ones."""
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
    return Table(columns, rows, most=None)


def _is_calibrated(path: str) -> bool:
    """Whether a file is one that this command wrote."""
    with contextlib.suppress(ValueError):
        return "calibrated" in read_toml(path, "job")
    return False
