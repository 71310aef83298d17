"""Predictions beside measured step times: calibrated to them, scored, and explained."""

import dataclasses
import os
from typing import Any

import numpy as np

import prism_jax as prism

from .._files import shown
from .._misc import check_unit, plural
from .._summary import Column, Table, picked_attributes
from ..data import is_profile, load_failures, load_job, save_job, variation_table
from . import _load
from ._options import Args, Output, command
from ._trace import read_names
from ._values import number, whole


_LEGEND = """\
mean_error, p95_error: predicted over measured, minus one; std_ratio: predicted over measured
ks: the Kolmogorov-Smirnov distance; ks_aligned: the same after the medians are made equal
w1_s, crps_s: the Wasserstein-1 distance and the continuous ranked probability score, in seconds
coverage_90: the share of measured steps between the predicted p5 and p95
noise: the scatter of the figure by chance, given the number of measured steps"""


# About so many causes and changes are simulated.
_CHANGES = 32
_STEP_TIME = number(1e-6, "a number of seconds from 1e-6 to 1e9")


@command(
    "RANDOM --column --unit",
    how={"--job": {"dest": "jobs"}, "--step-time": _STEP_TIME},
)
def calibrate(args: Args) -> Output:
    """Calibrate a job to measured step times, so that it predicts other scales; or a job of plain
    PyTorch to a profile, so that it predicts other batches and lengths.

    job [JOB]  a shipped job (`prism-jax jobs`) or a .toml file; not needed if each --to has a --job
    --to STEP_TIMES...  measured step times, as of `prism-jax diagnose`; can be repeated, each with
        the --job that was measured
    --job JOB...  the job of each --to, in the same order: on the same software and machine, at
        another scale or in another layout; the first is calibrated and written
    --trace TRACE  a profile of the JOB as of `prism-jax trace`, in place of --to: how long its
        kernels take is that of the machine
    --step-time S  a step time without the profiler, in seconds, from which what the host takes for
        launches follows
    --names NAMES  a .toml file with the meaning of ranges in the trace
    --out JOB2.toml (required)  the file to write

    example: prism-jax calibrate job.toml --to step_times.csv --out mine.toml
    """
    names = [*[args.job] * (args.job is not None), *args.jobs]
    if bool(args.to) == bool(args.trace) or ((args.step_time or args.names) and not args.trace):
        raise ValueError(
            "Give one of --to and --trace, and --step-time and --names with --trace alone."
        )
    if args.trace:
        return _to_profile(args, names)
    if len(names) != len(args.to):
        raise ValueError(
            f"{plural(len(names), 'job')} and {plural(len(args.to), 'file')} of step "
            "times were given; give each --to one --job, or the first the JOB."
        )
    for name in filter(is_profile, names):
        raise ValueError(f"{shown(name)}: this is a profile, which is fitted already; give a job.")
    jobs, all_runs = _jobs_and_runs(args, names)
    calibration, agreement = prism.calibration, prism.calibration.agreement
    _load.use_devices(args, lambda: prism.program.compile_job(jobs[0]), 2 * len(jobs))
    others = list(zip(jobs[1:], all_runs[1:], strict=True))
    source = f"calibrated to {', '.join(map(os.path.basename, args.to))}"
    options = {"key": _load.key_of(args), "progress": _load.wants_progress(args)}
    job = calibration.calibrate(jobs[0], all_runs[0], others=others, source=source, **options)
    save_job(job, args.out)
    calibrated = job.calibrated
    assert calibrated is not None
    _load.tell_notes([job])
    law_of, laws = ("kernel", "component", "family"), calibrated.variability
    level = calibrated.level.items()
    paths_of_others = zip(names[1:], args.to[1:], others, strict=True)
    result = {
        "job": args.out,
        "num_steps": sum(len(run) for runs in all_runs for run in runs),
        "num_runs": sum(map(len, all_runs)),
        **{name: figure.value for name, figure in level},
        "standard_errors": {name: figure.standard_error for name, figure in level},
        **picked_attributes(calibrated.uncertainty, "prior"),
        "variability": [picked_attributes(law, *law_of) | law.parameters for law in laws],
        "agreement": agreement(job, all_runs[0]),
        "agreement_of_others": [
            {"job": name, "to": path}
            | agreement(calibration.with_calibrated(at_scale, calibrated), runs)
            for name, path, (at_scale, runs) in paths_of_others
        ],
    }
    steps, runs = plural(result["num_steps"], "step"), plural(result["num_runs"], "run")
    title = f"{args.out}: calibrated to {steps} of {runs}"
    changed = dataclasses.replace(calibrated.summary(), title=title)
    return Output(result, changed, variation_table(laws), _agreement(result, args.to[0]))


def _jobs_and_runs(args: Args, names: list[str]) -> tuple[list[Any], list[list[np.ndarray]]]:
    """The jobs, and the measured runs of each, whose step times must be in seconds."""
    jobs = [load_job(name, args.overrides) for name in names]
    measured = zip(args.to, jobs, strict=True)
    all_runs = [_load.measured_runs(args, path, job) for path, job in measured]
    for path, runs in zip(args.to, all_runs, strict=True):
        prism.calibration.check_runs(runs, f"{shown(path)}: ")
    for path, runs, job in zip(args.to, all_runs, jobs, strict=True):
        if job.model is not None and job.cluster is not None:
            predicted = prism.prediction.predict(job).mean
            check_unit(float(np.median(np.concatenate(runs))), predicted, f"{shown(path)}: ")
    return jobs, all_runs


def _to_profile(args: Args, names: list[str]) -> Output:
    """Calibrates one job to a profile."""
    if len(names) != 1:
        raise ValueError(f"{plural(len(names), 'job')} for one --trace; give the one profiled.")
    job = load_job(names[0], args.overrides)
    if job.model is None:
        raise ValueError(f"{shown(names[0])}: it has no model; give the job that was profiled.")
    profiled = prism.trace.contents(prism.trace.read_rank_traces(args.trace), read_names(args))
    source = f"calibrated to {os.path.basename(args.trace)}"
    job, host = prism.diagnosis.calibrated_to_profile(job, profiled, source, args.step_time)
    save_job(job, args.out)
    classes = prism.diagnosis.kernel_classes(job, profiled)
    seconds = prism.prediction.predict(job).mean
    result = {"job": args.out, "host": host, "step_time_s": seconds, "classes": classes}
    table = dataclasses.replace(
        prism.diagnosis.classes_table(classes),
        title=f"{args.out}: kernels after calibration, with the gaps between them",
    )
    return Output(result, table, f"{host}; a step takes {seconds:.4g} s")


def _agreement(result: dict[str, Any], first: str) -> Table:
    """Figures of the calibrated steps beside the measured ones."""
    elsewhere = result["agreement_of_others"]
    rows = [
        {"of": figures["to"], "figure": name, "ours": pair[0], "theirs": pair[1]}
        for figures in ({"to": first, **result["agreement"]}, *elsewhere)
        for name, pair in figures.items()
        if name not in ("job", "to")
    ]
    columns = (
        *[Column("steps", "of")] * bool(elsewhere),
        Column("of one run", "figure"),
        Column("calibrated", "ours", ".5g"),
        Column("measured", "theirs", ".5g"),
    )
    return Table(columns, rows)


@command("SIMULATED --steps --column --unit", csv=True)
def score(args: Args) -> Output:
    """Compare the predicted law of the step time with measured step times.

    --against STEP_TIMES (required)  measured step times, as of `prism-jax diagnose`

    example: prism-jax score mine.toml --against step_times.csv
    """
    job = _load.load(args)
    steps = np.concatenate(_load.measured_runs(args, args.against, _load.job_of(job)))
    measured = steps[args.steps]
    if len(measured) < 2:
        raise ValueError(
            f"{shown(args.against)}: {plural(len(measured), 'step')} of {len(steps)} left to "
            "score against; give at least two steps, and a `--steps` that keeps them."
        )
    program, options = _load.compiled(args, job)
    law = prism.engine.simulate(program, **options)
    where = f"{shown(args.against)}: "
    check_unit(float(np.median(measured)), float(law.quantile(0.5)), where)
    scores = prism.analysis.score(law, measured, key=options["key"])
    _, header = _load.of(job, program)
    return Output({"name": job.name}, header, scores, _LEGEND)


@command(
    "RANDOM --allow-oom --column --unit",
    how={"--step-time": _STEP_TIME, "--spares": whole(0), "--samples": whole(32)},
)
def diagnose(args: Args) -> Output:
    """Say whether a measured step time is normal, what explains it, and what to change.

    job [JOB]  a shipped job (`prism-jax jobs`), or a .toml file; with --log, by default the job of
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
    --restart S (600)  seconds: a restart without a slow rank, or with it elsewhere
    --spares K  spare nodes (unlimited); without one, a restart waits for a repair
    --repair S  seconds: until a replaced node can be used as a spare (that of --failures)
    --failures FAILURES (llama-3)  counts of interruptions, as of `prism-jax run`, which take spares
    --names NAMES  a .toml file with the meaning of ranges in traces
    --samples N (1024)  steps to simulate of each change, at least 32

    example: prism-jax diagnose gpt3-175b-h100-4096 --step-time 1.9
    """
    _check_options(args)
    names = read_names(args)
    job = _job_of_log(args) if args.job is None else _load.load(args)
    has_model = _load.has_model(job)
    if not (has_model or (_load.job_of(job) and args.trace is not None)):
        problem = "it has no model, so no step is predicted; give a job with a model, or a --trace"
        raise ValueError(f"{shown(args.job or args.log or args.ranks)}: {problem}.")
    if args.ranks is not None:
        return _slow_ranks(args, job)
    log, steps = args.log or args.measured, None
    runs: list[Any] = [] if args.step_time is None else [np.array([args.step_time])]
    if log is not None:
        steps = _load.read_measured(args, log, _load.job_of(job))
        runs = [*steps.runs]
    ranks: list[Any] = []
    if args.trace:
        profiled = prism.trace.contents(prism.trace.read_rank_traces(args.trace), names)
        ranks = [*profiled.by_rank] or [profiled]
    if not has_model:
        diagnosis = prism.diagnosis.diagnose_ranks(job, ranks)
    else:
        if args.log is None:
            _load.check_memory(args, job)
        elif short := prism.prediction.shortage(job):  # It ran.
            _load.tell_note(f"It ran, although it is reckoned not to fit: {short}")
        typical = float(np.median(np.concatenate(runs or [prism.trace.median_step_times(ranks)])))
        where = f"{shown(log or args.trace or '--step-time')}: "
        check_unit(typical, prism.prediction.predict(job).mean, where)
        _load.tell_notes([job])
        _load.use_devices(args, lambda: prism.program.compile_job(job), _CHANGES)
        _load.say(args, f"simulating causes and changes of {job.name}")
        options = {"num_samples": args.samples, "key": _load.key_of(args)}
        causes = prism.diagnosis.hypotheses(job, **options)
        diagnosis = prism.diagnosis.diagnose(causes, runs, ranks)
    logged = {} if steps is None else {"steps": steps}
    return Output({"job": job.name}, job.header, logged, diagnosis, *diagnosis.changes_tables())


def _check_options(args: Args) -> None:
    """Raises a `ValueError` for options of `diagnose` that do not go together."""
    sources = (args.log, args.measured, args.step_time, args.trace, args.ranks)
    if sum(source is not None for source in sources) != 1:
        raise ValueError("Give one of --log, --measured, --step-time, --trace and --ranks.")
    of_ranks = (args.steps, args.spares, args.repair)
    if any(value is not None for value in of_ranks) and not args.ranks:
        raise ValueError("`--steps`, `--spares` and `--repair` go with slow ranks; give --ranks.")
    if (args.column or args.unit) and not (args.log or args.measured):
        raise ValueError(
            "`--column` and `--unit` are those of a table; give a --log or --measured, too."
        )
    if args.job is not None and (args.config or args.cluster or args.batch):
        raise ValueError(
            "`--config`, `--cluster` and `--batch` describe the job of a --log; drop them, or JOB."
        )


def _slow_ranks(args: Args, job: Any) -> Output:
    """What measured slow ranks cost, and what to do with them."""
    ranks, devices = job.layout.world_size, job.cluster.devices_per_node
    measured = prism.logs.read_ranks(args.ranks, ranks, devices)
    failures = load_failures(args.failures)
    repair = failures.repair_s if args.repair is None else args.repair
    if args.spares is not None and not repair:
        raise ValueError("With `--spares`, a node that was drained is in repair; give `--repair`.")
    wait = prism.diagnosis.wait_for_spare(failures, ranks, repair, args.spares)
    _load.tell_notes([job])
    _load.use_devices(args, lambda: prism.program.compile_job(job), _CHANGES)
    _load.say(args, f"simulating slow ranks of {job.name}")
    costs = {"restart_s": args.restart, "wait_s": wait, "num_steps": args.steps}
    options = {"num_samples": args.samples, "key": _load.key_of(args)}
    slow = prism.diagnosis.slow_ranks(job, measured, **costs, **options)
    result = {"job": job.name, "source": measured.source}
    return Output(result, job.header, measured.source, slow)


def _job_of_log(args: Args) -> Any:
    """The job of the configurations of a logged run, or of the arguments that its log prints."""
    if args.log is None and args.ranks is None:
        raise ValueError("Give the JOB that was measured; only a --log may print it.")
    changes = [text for text in args.overrides if not text.startswith("world_size=")]
    gpus = [int(text.partition("=")[2]) for text in args.overrides if text not in changes]
    try:
        imported = prism.importers.import_job(
            args.config or [args.log or args.ranks],
            gpus[-1] if gpus else None,
            cluster=args.cluster,
            batch=args.batch,
            overrides=changes,
        )
    except ValueError as error:
        if args.config:
            raise
        advice = "if it does not print the arguments of its job, give JOB, or --config"
        raise ValueError(f"{str(error).rstrip('.')}; {advice}.") from None
    if imported.question:
        raise ValueError(imported.question)
    for note in imported.notes:
        _load.tell_note(note)
    return imported.job
