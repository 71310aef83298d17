import shlex

from .._files import shown
from .._interrupt import told_interrupt
from . import _load, _prism as prism
from ._options import LAW, OBJECTIVE, REQUIRED, Given, Output, command
from ._values import check_out, objective, quantile


@command(LAW, OBJECTIVE, how={"--quantile": (quantile, 0.5), "--out": REQUIRED})
def report(given: Given) -> Output:
    """Write an HTML page about a job: its step time, what it depends on, and the assumptions.

    --quantile Q  show the step at this quantile op by op: 0.99 for a slow step (0.5)
    --measured STEP_TIMES  diagnose these step times, as of `prism-jax diagnose`
    --out PAGE.html  the file to write

    example: prism-jax report gpt3-175b-h100-4096 --samples 100000 --out report.html
    """
    check_out(given.out, ".html")
    job = _load.load(given)
    wanted = objective(given.objective)
    if given.measured is not None and job.modelled is None:
        raise ValueError(
            f"{shown(given.job)}: this has no model; `--measured` is for jobs with one."
        )
    prism.report.check_matplotlib()
    measured = [] if given.measured is None else prism.trace.read_runs(given.measured)
    program, options = _load.compiled(given, job)
    found = prism.report.gather(
        job.of,
        program,
        **options,
        sampling=given.sampling,
        allocations=given.allocations,
        levels={**prism.law.QUANTILES, **given.quantiles},
        objective=wanted,
        quantile=given.quantile,
        measured=measured,
        commands=_commands(given),
        seed=str(given.seed),
    )
    prism.report.save_html(found, given.out)
    if any("interrupted" in why for why in found.missing.values()):
        told_interrupt()
    for name, why in found.missing.items():
        _load.tell_note(f"{name}: {why}")
    law = found.law
    levels = {name: float(law.quantile(q)) for name, q in found.levels.items()}
    result = {
        "job": job.name,
        "out": given.out,
        "step_time_s": {"mean": law.mean, **levels},
        "num_samples": law.num_samples,
        "missing": found.missing,
    }
    text = (
        f"{job.name}: mean {law.mean:.5g} s, p95 {law.quantile(0.95):.5g} s; the report is written "
        f"to {shown(given.out)}, which any browser opens"
    )
    return Output(result, [text])


def _commands(given: Given) -> dict[str, str]:
    """A command that prints a figure of the page again, for the function behind each figure. All
    figures except the law use few steps.
    """
    job = [given.job, *(word for one in given.overrides for word in ("--set", one))]
    seed = ["--seed", str(given.seed), *["--allow-oom"] * given.allow_oom]
    few = [*job, "--samples", str(min(given.samples, prism.report.MOST_STEPS)), *seed]
    law = [*job, "--samples", str(given.samples), *seed, "--sampling", given.sampling]
    if given.allocations is not None:
        law += ["--allocations", str(given.allocations)]
    if given.quantiles:
        law += ["--quantiles", ",".join(f"{q:.12g}" for q in given.quantiles.values())]
    step = ["--quantile", f"{given.quantile:g}", "--out", "step.json"]
    words = {
        "simulate": ["simulate", *law],
        "sensitivity": ["sensitivity", *few, "--objective", given.objective],
        "criticality": ["criticality", *few],
        "memory": ["memory", *job],
        "sample_step": ["timeline", *few, *step],
        "load_job": ["show", *job],
    }
    return {name: shlex.join(["prism-jax", *line]) for name, line in words.items()}
