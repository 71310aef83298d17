"""`prism-jax report`: all that is known of a job's step, as one page of HTML."""

import argparse
import shlex
import sys
from typing import Any

from .._files import shown
from ._arguments import check_out, quantile
from ._objective import add_objective_argument, objective
from ._simulate import add_law_arguments, check_epistemic


HELP = "write a page of HTML about a job: its law, what it depends on, and what it rests on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_law_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--quantile",
        type=quantile,
        default=0.5,
        metavar="Q",
        help="of the step that is shown op by op: 0.99 for a slow one (0.5)",
    )
    parser.add_argument("--out", required=True, metavar="PAGE.html", help="the file to write")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    check_out(arguments.out, ".html")  # Bad input fails before JAX starts.
    job = load(arguments)
    check_epistemic(arguments, job)
    wanted = objective(arguments.objective)

    from ..law import QUANTILES
    from ..report import check_matplotlib, gather, save_html

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
        words=_words(arguments),
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


def _words(arguments: argparse.Namespace) -> str:
    """The job on a command line, with what is changed in it."""
    changes = [word for change in arguments.overrides for word in ("--set", change)]
    return shlex.join([arguments.job, *changes])
