"""`prism-jax target`: how much a part may vary for a figure to meet a target."""

import argparse
from typing import Any

from ._arguments import add_job_arguments
from ._json import plain
from ._objective import add_objective_argument, objective


HELP = "print how much a part may vary for a figure of the step time to meet a target"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--part", required=True, metavar="PART", help="the part, such as all_gather"
    )
    parser.add_argument(
        "--at", type=float, required=True, metavar="X", help="the target, in the figure's unit"
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    job = load(arguments)  # Bad input fails before JAX starts.

    from ..analysis import target

    wanted = objective(arguments.objective)
    program, options = compiled(arguments, job)
    found = target(program, wanted, arguments.part, arguments.at, **options)
    text = (
        f"{job.name}: with {found.factor} times its spread, `{arguments.part}` gives {wanted} = "
        f"{found.reached:.6g}; with its present spread {found.as_it_is:.6g}, without any "
        f"{found.without:.6g} ({found.num_samples:,} steps)"
    )
    about = {"job": job.name, "objective": str(wanted), "unit": wanted.unit}
    return {**about, "part": arguments.part, **plain(found)}, "\n".join([text, *found.notes])
