"""`prism-jax sensitivity`: how much the variability of each part costs."""

import argparse
from typing import Any

from .._estimate import Estimate
from ._arguments import add_job_arguments, count
from ._json import plain
from ._objective import add_objective_argument, objective, with_unit


HELP = "print on which kernels, stages, ranks and shared factors a figure of the step time depends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add_objective_argument(parser)
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="how many rows to print (10)"
    )
    parser.add_argument(
        "--shapley",
        default="",
        metavar="NAME,NAME",
        help="divide the joint gain of up to ten parts among them, such as gemm,rank,step",
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    job = load(arguments)  # Bad input fails before JAX starts.

    from ..analysis import sensitivity

    wanted = objective(arguments.objective)
    program, options = compiled(arguments, job)
    shapley = [name.strip() for name in arguments.shapley.split(",") if name.strip()]
    found = sensitivity(program, wanted, shapley=shapley, **options)
    return {"job": job.name, **plain(found)}, _text(job.name, found, arguments.top)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part."""
    return result["parts"]


def _text(name: str, found, top: int) -> str:
    lines = [
        f"{name}: {found.objective} = {with_unit(found.value, found.unit)}",
        "",
        f"{'in ' + found.unit:<24}{'mean':>11}{'spread':>11}{'+-':>9}{'gain':>11}{'+-':>9}",
    ]

    def cells(figure: Estimate | None, with_error: bool = True) -> str:
        if figure is None:
            return f"{'-':>11}" + f"{'-':>9}" * with_error
        known = figure.standard_error == figure.standard_error
        error = f"{figure.standard_error:.1g}" if known else "unknown"
        return f"{figure.value:>11.4g}" + f"{error:>9}" * with_error

    shown, others = found.parts[:top], found.parts[top:]
    longest = max((part.mean.value for part in shown if part.mean), default=0.0)
    long = [part for part in others if part.mean and part.mean.value > longest]
    for part in (*shown, *long):
        row = cells(part.mean, False) + cells(part.spread) + cells(part.gain)
        lines.append(f"{part.name:<24}{row}")
    lines += [
        "",
        "mean, spread: what a part's latency and variability cost, to first order; gain: without "
        "its variability",
        f"all variability together: {found.whole_gain}; the sum of the gains of kernels, factors "
        f"and stalls: {found.sum_of_gains}",
    ]
    lines += [f"Shapley value of {name}: {value}" for name, value in found.shapley.items()]
    lines.append(f"{found.num_samples:,} steps")
    return "\n".join([*lines, *found.notes])
