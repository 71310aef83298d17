"""`prism-jax report`: all results about a job's step, as one page of HTML."""

import argparse
import shlex

from .._files import shown
from . import _load
from ._command import Output, argument, command
from ._options import LAW, OBJECTIVE
from ._simulate import check_epistemic
from ._values import check_out, objective, quantile


@command(
    "write an HTML page about a job: its step time, what it depends on, and the assumptions",
    "gpt3-175b-h100-4096 --samples 100000 --out report.html",
    *LAW,
    OBJECTIVE,
    argument(
        "--quantile",
        "Q",
        "show the step at this quantile op by op: 0.99 for a slow step (0.5)",
        quantile,
        0.5,
    ),
    argument("--out", "PAGE.html", "the file to write", required=True),
)
def run(arguments: argparse.Namespace) -> Output:
    check_out(arguments.out, ".html")  # Bad input fails before JAX starts.
    job = _load.load(arguments)
    check_epistemic(arguments, job)
    wanted = objective(arguments.objective)

    from ..law import QUANTILES
    from ..report import MOST_STEPS, check_matplotlib, gather, save_html

    check_matplotlib()
    program, options = _load.compiled(arguments, job)
    found = gather(
        job.of,
        program,
        **options,
        sampling=arguments.sampling,
        allocations=arguments.allocations,
        epistemic=arguments.epistemic,
        levels={**QUANTILES, **arguments.quantiles},
        objective=wanted,
        quantile=arguments.quantile,
        commands=_commands(arguments, MOST_STEPS),
        seed=str(arguments.seed),
    )
    save_html(found, arguments.out)
    for name, why in found.missing.items():
        _load.tell_note(f"{name}: {why}")
    law = found.law
    levels = {name: float(law.quantile(q)) for name, q in found.levels.items()}
    result = {
        "job": job.name,
        "out": arguments.out,
        "step_time_s": {"mean": law.mean, **levels},
        "num_samples": law.num_samples,
        "missing": found.missing,
    }
    text = (
        f"{job.name}: mean {law.mean:.5g} s, p95 {law.quantile(0.95):.5g} s; the report is written "
        f"to {shown(arguments.out)}, which any browser opens"
    )
    return Output(result, [text])


def _commands(arguments: argparse.Namespace, most: int) -> dict[str, str]:
    """A command that prints a figure of the page again, for the function behind each figure. All
    figures except the law use at most `most` steps.
    """
    job = [arguments.job, *(word for one in arguments.overrides for word in ("--set", one))]
    seed = ["--seed", str(arguments.seed), *["--allow-oom"] * arguments.allow_oom]
    few = [*job, "--samples", str(min(arguments.samples, most)), *seed]
    law = [*job, "--samples", str(arguments.samples), *seed, "--sampling", arguments.sampling]
    if arguments.allocations is not None:
        law += ["--allocations", str(arguments.allocations)]
    law += ["--epistemic"] * arguments.epistemic
    if arguments.quantiles:
        law += ["--quantiles", ",".join(f"{q:.12g}" for q in arguments.quantiles.values())]
    step = ["--quantile", f"{arguments.quantile:g}", "--out", "step.json"]
    words = {
        "simulate": ["simulate", *law],
        "sensitivity": ["sensitivity", *few, "--objective", arguments.objective],
        "criticality": ["criticality", *few],
        "memory": ["memory", *job],
        "sample_step": ["timeline", *few, *step],
        "load_job": ["show", *job],
    }
    return {name: shlex.join(["prism-jax", *line]) for name, line in words.items()}
