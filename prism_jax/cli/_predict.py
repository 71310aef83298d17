"""The step time of a job: without variability, simulated, and as a page; and its memory."""

import dataclasses
import shlex
from typing import Any

import prism_jax as prism

from .._files import shown
from .._interrupt import told_interrupt
from .._summary import GIB
from ..data import load_job
from . import _load
from ._compare import check_cost
from ._options import Args, Output, command
from ._trace import read_names
from ._values import objective


@command("SET --allow-oom", csv=True)
def predict(args: Args) -> Output:
    """Print the step time without variability, and its parts, within seconds.

    job JOB  a shipped job (`prism-jax jobs`), or a .toml file

    example: prism-jax predict gpt3-175b-h100-4096 --set training.dtype=fp8
    """
    job, prediction = load_job(args.job, args.overrides), prism.prediction
    _load.check_memory(args, job)
    predicted = prediction.predict(job)
    _load.tell_notes([job])
    rates = {"throughput": prediction.throughput(job, prediction=predicted)}
    if (drawn := prediction.energy(job, predicted)) is not None:
        rates["energy"] = drawn
    needed, error = prediction.memory(job), prediction.expected_error(job)
    low, high = (predicted.mean * factor for factor in error.interval())
    effects = prediction.effects_of_stack(job, predicted.mean)
    left_out = prediction.uncounted(job, predicted.mean)
    return Output(
        {"job": job.name, "world_size": job.layout.world_size, **predicted.to_json()},
        {"memory_bytes": needed.fullest.bytes, "fits": needed.fits},
        {"prediction_interval_90": {"mean": [low, high]}, "expected_error": error},
        {"effects_of_stack": effects, "uncounted": left_out},
        job.header,
        [f"{predicted.mean:.5g} s a step, without variability"],
        [f"90 % of such runs: {low:.4g} .. {high:.4g} s, {error}"],
        rates,
        [] if needed.fits else [_fit(job, needed)],
        [effect.text for effect in effects],
        [left_out],
        prediction.parts_table(predicted.breakdown),
    )


@command("SET", csv=True)
def memory(args: Args) -> Output:
    """Print the peak memory of each pipeline rank, by part.

    job JOB  a shipped job (`prism-jax jobs`), or a .toml file

    example: prism-jax memory gpt3-175b-h100-4096 --set training.recompute=full
    """
    job = load_job(args.job, args.overrides)
    needed = prism.prediction.memory(job)
    return Output(job.header, needed, _fit(job, needed))


def _fit(job: Any, needed: Any) -> str:
    """Whether a job fits; what was compared; and why it ran nevertheless, if that is known."""
    fits = "It fits" if needed.fits else "It does not fit"
    reserved = ", ".join(f"{name} {size / GIB:.2f}" for name, size in needed.reserved.items())
    compared = (
        f"{fits} {job.cluster.device.name}: its fullest GPU needs "
        f"{needed.fullest.bytes / GIB:.2f} GiB, and of {needed.device_bytes / GIB:.2f} GiB "
        f"{needed.usable_bytes / GIB:.2f} are usable (less {reserved})."
    )
    return compared if needed.fits else f"{compared} {job.allow_oom}".rstrip()


_EXPOSED = (
    "exposed communication of data parallelism: {mean:.3g} s of a step on average, p95 {p95:.3g} s"
)


@command("LAW", csv=True)
def simulate(args: Args) -> Output:
    """Simulate a job and print the law of its step time.

    --epistemic  also print the law of a step of any such run, with the uncertainty of the model
    --out LAW.npz  a file to write the law to, for prism_jax.load_law

    example: prism-jax simulate gpt3-175b-h100-4096 --samples 100000 --set layout.dp=64 --quantiles
    0.999
    """
    job = _load.load(args)
    if args.epistemic and not _load.has_model(job):
        raise ValueError(
            f"{shown(args.job)}: this has no model, and it is not known how far its level may be "
            "off; leave `--epistemic` out, or give a job with a model."
        )
    program, options = _load.compiled(args, job)
    loaded = _load.job_of(job)
    drawn = {"sampling": args.sampling, "allocations": args.allocations}
    law = prism.engine.simulate(program, **drawn, **options)
    if args.out is not None:
        prism.law.save_law(law, args.out)
    # Of a job as it is shipped; a changed one was not measured.
    measured = None if loaded is None or args.overrides else loaded.measured
    levels = {**prism.law.QUANTILES, **args.quantiles}
    future = None if loaded is None else prism.calibration.epistemic(loaded, law)
    expected = None if future is None else future.intervals(levels)
    table = prism.law.law_table(law, levels, measured and measured.figures, expected)
    size = {"world_size": job.layout.world_size}
    parts: list[Any] = [*_load.of(job, program), size, law.to_json(levels)]
    parts.append(dataclasses.replace(table, title=""))
    fit: list[str] = []
    if loaded is not None and future is not None:
        sources = loaded.kernels.sources
        names = [{"name": s.name, "stands_in_for": s.stands_in_for} for s in sources]
        parts.append({"kernels": names, "notes": _load.all_notes(loaded)})
        parts.append({"prediction_interval_90": expected, "expected_error": future.error})
        parts.append([f"90 % of such runs: {future.error}"])  # What an interval means comes first.
    if measured is not None:
        rows = [row for row in table.rows if row["measured_s"] is not None]
        errors = {row["figure"]: row["predicted_s"] / row["measured_s"] - 1 for row in rows}
        parts.append({"measured": measured, "relative_error": errors})
    if loaded is not None and loaded.model is not None:
        needed = prism.prediction.memory(loaded)
        per_gpu = prism.prediction.throughput(loaded, law.mean)
        parts.append({"throughput": per_gpu, "fits": needed.fits})
        fit += [] if needed.fits else [_fit(loaded, needed)]
    exposed = _exposed(program, options)
    parts.append({"exposed_data_parallel_s": exposed})
    if exposed["mean"] > 0:
        parts.append([_EXPOSED.format(**exposed)])
    if future is not None:
        parts += [{"epistemic": future}] * args.epistemic
        parts.append([prism.law.about_noise(law, future.intervals())])
    _load.tell_interrupted("steps", law, law.num_samples)
    return Output(*parts, [law.headline()], fit)


def _exposed(program: Any, options: dict[str, Any]) -> dict[str, float]:
    """The exposed communication of data parallelism, in seconds of a step."""
    options = {name: options[name] for name in ("num_samples", "key")}
    exposed = prism.analysis.exposed_data_parallel(program, **options)
    return prism.analysis.levels_of(exposed, (50, 95))


@command("LAW --objective --column --unit --tokens --price")
def report(args: Args) -> Output:
    """Write an HTML page about a job: its step time, what it depends on, and the assumptions.

    --quantile Q (0.5)  show the step at this quantile op by op: 0.99 for a slow step
    --measured STEP_TIMES  diagnose these step times, as of `prism-jax diagnose`
    --trace TRACE  diagnose this profile, and show its parts of a step beside those predicted
    --names NAMES  a .toml file with the meaning of ranges in the trace
    --out PAGE.html (required)  the file to write

    example: prism-jax report gpt3-175b-h100-4096 --samples 100000 --out report.html
    """
    job = _load.load(args)
    wanted = objective(args.objective)
    for option, path in (("--measured", args.measured), ("--trace", args.trace)):
        if path is not None and not _load.has_model(job):
            raise ValueError(
                f"{shown(args.job)}: this has no model; `{option}` is for jobs with one."
            )
    check_cost(args, [job])
    prism.report.check_matplotlib()
    measured = []
    if args.measured is not None:
        measured = _load.measured_runs(args, args.measured, _load.job_of(job))
    names, profiled = read_names(args), None
    if args.trace:
        profiled = prism.trace.contents(prism.trace.read_rank_traces(args.trace), names)
    program, options = _load.compiled(args, job)
    gathered = prism.report.gather(
        job,
        program,
        **options,
        sampling=args.sampling,
        allocations=args.allocations,
        levels={**prism.law.QUANTILES, **args.quantiles},
        objective=wanted,
        quantile=args.quantile,
        measured=measured,
        profiled=profiled,
        tokens=args.tokens,
        price=args.price,
        commands=_commands(args),
        seed=str(args.seed),
    )
    prism.report.save_html(gathered, args.out)
    if any("interrupted" in why for why in gathered.missing.values()):
        told_interrupt()
    for name, why in gathered.missing.items():
        _load.tell_note(f"{name}: {why}")
    law = gathered.law
    levels = {name: float(law.quantile(q)) for name, q in gathered.levels.items()}
    result = {
        "out": args.out,
        "step_time_s": {"mean": law.mean, **levels},
        "num_samples": law.num_samples,
        "missing": gathered.missing,
    }
    text = (
        f"mean {law.mean:.5g} s, p95 {law.quantile(0.95):.5g} s; the report is written to "
        f"{shown(args.out)}, which any browser opens"
    )
    return Output(*_load.of(job, program), result, text)


def _commands(args: Args) -> dict[str, str]:
    """A command that prints a figure of the page again, for the function behind each figure. All
    figures except the law use few steps.
    """
    job = [args.job, *(word for change in args.overrides for word in ("--set", change))]
    seed = ["--seed", str(args.seed), *["--allow-oom"] * args.allow_oom]
    with_samples = [*job, "--samples", str(min(args.samples, prism.report.MOST_STEPS)), *seed]
    law = [*job, "--samples", str(args.samples), *seed, "--sampling", args.sampling]
    if args.allocations is not None:
        law += ["--allocations", str(args.allocations)]
    if args.quantiles:
        law += ["--quantiles", ",".join(f"{q:.12g}" for q in args.quantiles.values())]
    step = ["--quantile", f"{args.quantile:g}", "--out", "step.json"]
    words = {
        "simulate": ["simulate", *law],
        "sensitivity": ["sensitivity", *with_samples, "--objective", args.objective],
        "criticality": ["criticality", *with_samples],
        "memory": ["memory", *job],
        "sample_step": ["timeline", *with_samples, *step],
        "load_job": ["show", *job],
    }
    return {name: shlex.join(["prism-jax", *line]) for name, line in words.items()}
