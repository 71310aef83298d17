"""`prism-jax improve`: where to reduce variability within a budget."""

import argparse
from typing import Any

from ._arguments import add_job_arguments, count, named_factor
from ._json import plain
from ._objective import add_objective_argument, objective, with_unit


HELP = "find where to reduce variability within a budget, to lower a figure of the step time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--cost",
        action="append",
        required=True,
        metavar="PART=COST",
        help="the cost of removing all of a part's spread, such as all_gather=3 or rank=2",
    )
    parser.add_argument(
        "--budget",
        type=float,
        required=True,
        metavar="B",
        help="the budget, in the unit of the costs",
    )
    parser.add_argument(
        "--iterations", type=count, default=20, metavar="K", help="iterations of the descent (20)"
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    job = load(arguments)  # Bad input fails before JAX starts.
    costs = dict(named_factor(text, "--cost", "all_gather=3", most=1e15) for text in arguments.cost)
    if len(costs) < len(arguments.cost):
        raise ValueError("--cost names a part twice; give one cost for each.")

    from ..analysis import improve

    wanted = objective(arguments.objective)
    program, options = compiled(arguments, job)
    iterations = arguments.iterations
    found = improve(program, wanted, costs, arguments.budget, num_iterations=iterations, **options)
    lines = [f"{job.name}: {found.objective}, with {found.spent:.4g} spent", ""]
    for label, figure in (
        ("as it is", found.before),
        ("improved", found.after),
        ("gain", found.gain),
    ):
        lines.append(f"{label:<24}{with_unit(figure, found.unit)}")
    lines += ["", "share of each part's spread to remove"]
    for name, share in sorted(found.removed.items(), key=lambda row: -row[1]):
        lines.append(f"{name:<24}{share:>12.3f}")
    lines += ["", f"{found.num_samples:,} steps for each figure, {len(found.path) - 2} iterations"]
    return {"job": job.name, **plain(found)}, "\n".join([*lines, *found.notes])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part."""
    return [{"part": name, "share": share} for name, share in result["removed"].items()]
