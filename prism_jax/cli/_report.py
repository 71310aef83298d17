"""`prism-jax report`: all results about a job's step, as one page of HTML."""

import argparse
import shlex
import sys
from typing import Any

from .._files import shown
from ._arguments import check_out, quantile
from ._objective import add_objective_argument, objective
from ._simulate import add_law_arguments, check_epistemic


HELP = "write an HTML page about a job: its step time, what it depends on, and the assumptions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_law_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--quantile",
        type=quantile,
        default=0.5,
        metavar="Q",
        help="show the step at this quantile op by op: 0.99 for a slow step (0.5)",
    )
    parser.add_argument("--out", required=True, metavar="PAGE.html", help="the file to write")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    check_out(arguments.out, ".html")  # Bad input fails before JAX starts.
    job = load(arguments)
    check_epistemic(arguments, job)
    wanted = objective(arguments.objective)

    from ..law import QUANTILES
    from ..report import MOST_STEPS, check_matplotlib, gather, save_html

    check_matplotlib()
    program, options = compiled(arguments, job)
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
        print(f"prism-jax: note: {name}: {why}", file=sys.stderr)
    result = {
        "job": job.name,
        "out": arguments.out,
        "step_time_s": {
            "mean": found.law.mean,
            **{name: float(found.law.quantile(q)) for name, q in found.levels.items()},
        },
        "num_samples": found.law.num_samples,
        "missing": found.missing,
    }
    text = (
        f"{job.name}: mean {found.law.mean:.5g} s, p95 {found.law.quantile(0.95):.5g} s; the "
        f"report is written to {shown(arguments.out)}, which any browser opens"
    )
    return result, text


def _commands(arguments: argparse.Namespace, most: int) -> dict[str, str]:
    """A command that prints a figure of the page again, for the function behind each figure. All
    figures except the law use at most `most` steps.
    """
    changes = [word for change in arguments.overrides for word in ("--set", change)]
    job = [arguments.job, *changes]
    oom = ["--allow-oom"] * arguments.allow_oom
    seed = ["--seed", str(arguments.seed), *oom]
    few = [*job, "--samples", str(min(arguments.samples, most)), *seed]
    law = [*job, "--samples", str(arguments.samples), *seed, "--sampling", arguments.sampling]
    if arguments.allocations is not None:
        law += ["--allocations", str(arguments.allocations)]
    law += ["--epistemic"] * arguments.epistemic
    if arguments.quantiles:
        law += ["--quantiles", ",".join(f"{q:.12g}" for q in arguments.quantiles.values())]
    words = {
        "simulate": ["simulate", *law],
        "sensitivity": ["sensitivity", *few, "--objective", arguments.objective],
        "criticality": ["criticality", *few],
        "memory": ["memory", *job],
        "sample_step": [
            *("timeline", *few),
            *("--quantile", f"{arguments.quantile:g}", "--out", "step.json"),
        ],
        "load_job": ["show", *job],
    }
    return {name: shlex.join(["prism-jax", *line]) for name, line in words.items()}
