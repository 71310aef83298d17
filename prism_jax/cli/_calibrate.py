import os
from collections.abc import Iterator, Sequence
from typing import Any

from .. import data
from .._estimate import Estimate
from .._files import shown
from .._summary import Column, Table, picked
from . import _load
from ._options import RANDOM, Given, Output, argument, command, repeated


_LEVEL = {
    "compute": "compute takes this many times as long",
    "network": "collectives between nodes take this many times as long",
    "constant_s": "seconds added to each step",
    "growth": "compute takes (replicas)^this times as long",
}


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
    for name in filter(data.is_profile, names):
        raise ValueError(f"{shown(name)}: this is a profile, which is fitted already; give a job.")
    jobs = [data.load_job(name, given.overrides) for name in names]
    all_runs = [read_runs(path) for path in given.to]
    data.check_job_path(given.out)
    if os.path.exists(given.out) and not _is_calibrated(given.out):
        raise ValueError(
            f"{shown(given.out)}: a file is there that this command did not write; give another "
            "name."
        )

    import jax
    import numpy as np

    from ..fitting import agreement, calibrate, calibrated_as, check_runs
    from ..prediction import predict

    for path, runs in zip(given.to, all_runs, strict=True):
        check_runs(runs, f"{shown(path)}: ")
    for path, runs, one in zip(given.to, all_runs, jobs, strict=True):
        if one.model is not None and one.cluster is not None:
            _load.tell_unit(path, float(np.median(np.concatenate(runs))), predict(one).mean)
    _load.use_all_cores()
    files = ", ".join(os.path.basename(path) for path in given.to)
    job = calibrate(
        jobs[0],
        all_runs[0],
        source=f"calibrated to {files}",
        key=jax.random.key(given.seed),
        others=list(zip(jobs[1:], all_runs[1:], strict=True)),
        progress=_load.wants_progress(given),
    )
    data.save_job(job, given.out)
    assert job.calibrated is not None
    _load.tell_notes([job])
    result = {
        "job": given.out,
        "num_steps": sum(len(run) for runs in all_runs for run in runs),
        "num_runs": sum(map(len, all_runs)),
        **_calibrated(job),
        "agreement": agreement(job, all_runs[0]),
        "agreement_of_others": [
            {"job": name, "to": path, **agreement(calibrated_as(one, job), runs)}
            for name, path, one, runs in [*zip(names, given.to, jobs, all_runs, strict=True)][1:]
        ],
    }
    return Output(result, [*_blocks(result, job.calibrated.variability, given.to[0])])


def _calibrated(job: Any) -> dict[str, Any]:
    """The calibrated values, as numbers."""
    from ..data import LEVEL

    found = job.calibrated
    errors = [found.uncertainty.covariance[i][i] ** 0.5 for i in range(len(LEVEL))]
    # The uncertainty of the two factors is that of their logarithms.
    level = {name: getattr(found, name) for name in LEVEL}
    errors = [e * level[n] if n in LEVEL[:2] else e for n, e in zip(LEVEL, errors, strict=True)]
    laws = [
        {**picked(v, "kernel", "component", "family"), **v.parameters} for v in found.variability
    ]
    errors = dict(zip(LEVEL, errors, strict=True))
    prior = list(found.uncertainty.prior)
    return {**level, "standard_errors": errors, "prior": prior, "variability": laws}


def _blocks(result: dict[str, Any], laws: Sequence[Any], first: str) -> Iterator[Table | str]:
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
    yield data.law_table(laws)
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


def _is_calibrated(path: str) -> bool:
    """Whether a file is one that this command wrote."""
    from ..data import read_toml

    try:
        return "calibrated" in read_toml(path, "job")
    except ValueError:
        return False
