"""Predictions beside measured step times: calibrated to them, scored, and explained."""

import dataclasses
import os
from typing import Any

import numpy as np

import prism_jax as prism

from .._files import shown
from .._misc import check_unit, counted
from .._summary import Column, Table, picked, plain
from ..data import is_profile, law_table, load_failures, load_job, save_job
from . import _load
from ._options import REQUIRED, Given, Output, command
from ._outputs import Writes
from ._trace import read_names
from ._values import count, number, whole


_LEGEND = """\
mean_error, p95_error: predicted over measured, minus one; std_ratio: predicted over measured
ks: the Kolmogorov-Smirnov distance; ks_aligned: the same after the medians are made equal
w1_s, crps_s: the Wasserstein-1 distance and the continuous ranked probability score, in seconds
coverage_90: the share of measured steps between the predicted p5 and p95
noise: the scatter of the figure by chance, given the number of measured steps"""


@command(
    "RANDOM --column --unit",
    how={
        "job": {"nargs": "?"},
        "--job": {"dest": "jobs"},
        "--step-time": number(1e-6, "seconds"),
        "--out": REQUIRED,
    },
    writes=Writes("--out", ".toml"),
)
def calibrate(given: Given) -> Output:
    """Calibrate a job to measured step times, so that it predicts other scales; or a job of plain
    PyTorch to a profile, so that it predicts other batches and lengths.

    job JOB  a shipped job (`prism-jax jobs`) or a .toml file; not needed if each --to has a --job
    --to STEP_TIMES...  measured step times, as of `prism-jax diagnose`; can be repeated, each with
        the --job that was measured
    --job JOB...  the job of each --to, in the same order: on the same software and machine, at
        another scale or in another layout; the first is calibrated and written
    --trace TRACE  a profile of the JOB as of `prism-jax trace`, in place of --to: how long its
        kernels take is that of the machine
    --step-time S  a step time without the profiler, in seconds, from which what the host takes for
        launches follows
    --names NAMES  a .toml file with the meaning of ranges in the trace
    --out JOB2  the .toml file to write

    example: prism-jax calibrate job.toml --to step_times.csv --out mine.toml
    """
    names = [*[given.job] * (given.job is not None), *given.jobs]
    if bool(given.to) == bool(given.trace) or (
        (given.step_time or given.names) and not given.trace
    ):
        raise ValueError(
            "Give one of --to and --trace, and --step-time and --names with --trace alone."
        )
    if given.trace:
        return _to_profile(given, names)
    if len(names) != len(given.to):
        raise ValueError(
            f"{counted(len(names), 'job')} and {counted(len(given.to), 'file')} of step "
            "times were given; give each --to one --job, or the first the JOB."
        )
    for name in filter(is_profile, names):
        raise ValueError(f"{shown(name)}: this is a profile, which is fitted already; give a job.")
    jobs = [load_job(name, given.overrides) for name in names]
    measured = zip(given.to, jobs, strict=True)
    all_runs = [_load.measured_runs(given, path, job) for path, job in measured]
    calibration, agreement = prism.calibration, prism.calibration.agreement
    for path, runs in zip(given.to, all_runs, strict=True):
        calibration.check_runs(runs, f"{shown(path)}: ")
    for path, runs, one in zip(given.to, all_runs, jobs, strict=True):
        if one.model is not None and one.cluster is not None:
            predicted = prism.prediction.predict(one).mean
            check_unit(float(np.median(np.concatenate(runs))), predicted, f"{shown(path)}: ")
    _load.use_all_cores()
    others = list(zip(jobs[1:], all_runs[1:], strict=True))
    source = f"calibrated to {', '.join(map(os.path.basename, given.to))}"
    options = {"key": _load.key_of(given), "progress": _load.wants_progress(given)}
    job = calibration.calibrate(jobs[0], all_runs[0], others=others, source=source, **options)
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
            {"job": name, "to": path, **agreement(calibration.with_calibrated(one, found), runs)}
            for name, path, one, runs in [*zip(names, given.to, jobs, all_runs, strict=True)][1:]
        ],
    }
    steps, runs = counted(result["num_steps"], "step"), counted(result["num_runs"], "run")
    what = f"calibrated to {steps} of {runs}"
    level = dataclasses.replace(found.summary(), title=f"{given.out}: {what}")
    return Output(result, [level, law_table(found.variability), _agreement(result, given.to[0])])


def _to_profile(given: Given, names: list[str]) -> Output:
    """Calibrates one job to a profile."""
    if len(names) != 1:
        raise ValueError(f"{counted(len(names), 'job')} for one --trace; give the one profiled.")
    job = load_job(names[0], given.overrides)
    if job.model is None:
        raise ValueError(f"{shown(names[0])}: it has no model; give the job that was profiled.")
    found = prism.trace.contents(prism.trace.read_ranks(given.trace), read_names(given))
    source = f"calibrated to {os.path.basename(given.trace)}"
    job, host = prism.diagnosis.calibrated_to_profile(job, found, source, given.step_time)
    save_job(job, given.out)
    classes = prism.diagnosis.kernel_classes(job, found)
    seconds = prism.prediction.predict(job).mean
    result = {"job": given.out, "host": host, "step_time_s": seconds, "classes": plain(classes)}
    table = dataclasses.replace(
        prism.diagnosis.classes_table(classes),
        title=f"{given.out}: kernels after calibration, with the gaps between them",
    )
    return Output(result, [table, f"{host}; a step takes {seconds:.4g} s"])


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


@command("SIMULATED --steps --column --unit", how={"--against": REQUIRED}, csv=True)
def score(given: Given) -> Output:
    """Compare the predicted law of the step time with measured step times.

    --against STEP_TIMES  measured step times, as of `prism-jax diagnose`

    example: prism-jax score mine.toml --against step_times.csv
    """
    job = _load.load(given)
    steps = np.concatenate(_load.measured_runs(given, given.against, _load.job_of(job)))
    measured = steps[given.steps]
    if len(measured) < 2:
        raise ValueError(
            f"{shown(given.against)}: {counted(len(measured), 'step')} of {len(steps)} left to "
            "score against; give at least two steps, and a `--steps` that keeps them."
        )
    program, options = _load.compiled(given, job)
    law = prism.engine.simulate(program, **options)
    where = f"{shown(given.against)}: "
    check_unit(float(np.median(measured)), float(law.quantile(0.5)), where)
    found = prism.analysis.score(law, measured, key=options["key"])
    table = found.summary()
    result = {"name": job.name, "num_steps": found.num_steps}
    # A ratio to the spread of measured steps that are all equal is not defined.
    result |= {row.pop("score"): row for row in plain(table.rows)}
    return Output(result, [_load.header(job, program), table, _LEGEND])


@command(
    "RANDOM --allow-oom --column --unit",
    how={
        "job": {"nargs": "?"},
        "--step-time": number(1e-6, "seconds"),
        "--batch": count,
        "--steps": count,
        "--restart": (number(0, "seconds"), 600.0),
        "--spares": whole(0),
        "--repair": number(0, "seconds"),
        "--failures": (str, "llama-3"),
        "--samples": (whole(32), 1024),
    },
)
def diagnose(given: Given) -> Output:
    """Say whether a measured step time is normal, what explains it, and what to change.

    job JOB  a shipped job (`prism-jax jobs`), or a .toml file; with --log, by default the job of
        the arguments that the log prints, or of --config
    --log LOG  the log of a framework, or metrics of W&B, TensorBoard or Transformers
    --config FILE...  a configuration of the run that was logged, as of `prism-jax import`; can be
        repeated
    --cluster CLUSTER  the cluster of that job (`prism-jax hardware`), or a .toml file
    --batch N  the sequences of a step of that job, if no file says them
    --measured STEP_TIMES  measured step times in the order of steps: a .csv or .parquet file with a
        column `step_time_s`, and a column `run` if there are several runs; or as of --log
    --step-time S  one measured step time, in seconds
    --trace TRACE  a profile as of `prism-jax trace`, or a folder with one of each rank, of the same
        steps
    --ranks FILE  how slow ranks are: a report of stragglers of Megatron-LM, FlagScale or NVRx in a
        log or as JSON; or a .csv or .parquet file with `rank`, `gpu` or `node`, and `factor`, or
        what a test has measured of each, such as `gemm_tflops` and `busbw`
    --steps N  the steps that are left, over which keeping a slow rank is weighed (those of a day)
    --restart S  seconds: a restart without a slow rank, or with it elsewhere (600)
    --spares K  spare nodes (unlimited); without one, a restart waits for a repair
    --repair S  seconds: until a replaced node can be used as a spare (that of --failures)
    --failures FAILURES  counts of interruptions, as of `prism-jax run`, which take spares (llama-3)
    --names NAMES  a .toml file with the meaning of ranges in traces
    --samples N  steps to simulate of each change (1024), at least 32

    example: prism-jax diagnose gpt3-175b-h100-4096 --step-time 1.9
    """
    sources = (given.log, given.measured, given.step_time, given.trace, given.ranks)
    if sum(source is not None for source in sources) != 1:
        raise ValueError("Give one of --log, --measured, --step-time, --trace and --ranks.")
    names = read_names(given)
    of_ranks = (given.steps, given.spares, given.repair)
    if any(value is not None for value in of_ranks) and not given.ranks:
        raise ValueError("`--steps`, `--spares` and `--repair` go with slow ranks; give --ranks.")
    if (given.column or given.unit) and not (given.log or given.measured):
        raise ValueError(
            "`--column` and `--unit` are those of a table; give a --log or --measured, too."
        )
    if given.job is not None and (given.config or given.cluster or given.batch):
        raise ValueError(
            "`--config`, `--cluster` and `--batch` describe the job of a --log; drop them, or JOB."
        )
    job = _job_of_log(given) if given.job is None else _load.load(given)
    has_model = _load.has_model(job)
    if not (has_model or (_load.job_of(job) and given.trace is not None)):
        what = "it has no model, so no step is predicted; give a job with a model, or a --trace"
        raise ValueError(f"{shown(given.job or given.log or given.ranks)}: {what}.")
    if given.ranks is not None:
        return _slow_ranks(given, job)
    log, steps = given.log or given.measured, None
    runs: list[Any] = [] if given.step_time is None else [np.array([given.step_time])]
    if log is not None:
        steps = _load.read_measured(given, log, _load.job_of(job))
        runs = [*steps.runs]
    ranks: list[Any] = []
    if given.trace:
        found = prism.trace.contents(prism.trace.read_ranks(given.trace), names)
        ranks = [*found.by_rank] or [found]
    if not has_model:
        diagnosis = prism.diagnosis.diagnose_ranks(job, ranks)
    else:
        if given.log is None:
            _load.check_memory(given, job)
        elif short := prism.prediction.shortage(job):  # It ran.
            _load.tell_note(f"It ran, although it is reckoned not to fit: {short}")
        typical = float(np.median(np.concatenate(runs or [prism.trace.step_times(ranks)])))
        where = f"{shown(log or given.trace or '--step-time')}: "
        check_unit(typical, prism.prediction.predict(job).mean, where)
        _load.tell_notes([job])
        _load.use_all_cores()
        _load.say(given, f"simulating causes and changes of {job.name}")
        options = {"num_samples": given.samples, "key": _load.key_of(given)}
        causes = prism.diagnosis.hypotheses(job, **options)
        diagnosis = prism.diagnosis.diagnose(causes, runs, ranks)
    result = {"job": job.name, **plain(diagnosis), "tell": diagnosis.tell}
    if steps is not None:
        result["steps"] = {"used": steps.used, "left_out": plain(steps.left_out)}
    tables = [diagnosis.summary()] if diagnosis.causes else []  # The lines say why there is none.
    lines = ([] if steps is None else [steps.line()]) + diagnosis.lines()
    return Output(result, [job.header, "\n".join(lines), *tables, *diagnosis.changes_tables()])


def _slow_ranks(given: Given, job: Any) -> Output:
    """What measured slow ranks cost, and what to do with them."""
    ranks, devices = job.layout.world_size, job.cluster.devices_per_node
    measured = prism.logs.read_ranks(given.ranks, ranks, devices)
    failures = load_failures(given.failures)
    repair = failures.repair_s if given.repair is None else given.repair
    if given.spares is not None and not repair:
        raise ValueError("With `--spares`, a node that was drained is in repair; give `--repair`.")
    wait = prism.diagnosis.wait_for_spare(failures, ranks, repair, given.spares)
    _load.tell_notes([job])
    _load.use_all_cores()
    _load.say(given, f"simulating slow ranks of {job.name}")
    costs = {"restart_s": given.restart, "wait_s": wait, "num_steps": given.steps}
    options = {"num_samples": given.samples, "key": _load.key_of(given)}
    slow = prism.diagnosis.slow_ranks(job, measured, **costs, **options)
    result = {"job": job.name, "source": measured.source, **plain(slow)}
    return Output(result, [job.header, measured.source, slow.summary()])


def _job_of_log(given: Given) -> Any:
    """The job of the configurations of a logged run, or of the arguments that its log prints."""
    if given.log is None and given.ranks is None:
        raise ValueError("Give the JOB that was measured; only a --log may print it.")
    changes = [text for text in given.overrides if not text.startswith("world_size=")]
    gpus = [int(text.partition("=")[2]) for text in given.overrides if text not in changes]
    try:
        imported = prism.importers.import_job(
            given.config or [given.log or given.ranks],
            gpus[-1] if gpus else None,
            cluster=given.cluster,
            batch=given.batch,
            overrides=changes,
        )
    except ValueError as error:
        if given.config:
            raise
        what = "if it does not print the arguments of its job, give JOB, or --config"
        raise ValueError(f"{str(error).rstrip('.')}; {what}.") from None
    if imported.question:
        raise ValueError(imported.question)
    for note in imported.notes:
        _load.tell_note(note)
    return imported.job
