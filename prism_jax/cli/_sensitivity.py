"""`prism-jax sensitivity`: which variability costs the step time what."""

import argparse
import dataclasses
from typing import Any

from ._arguments import add_job_arguments, count
from ._devices import use_all_cores
from ._objective import add_objective_argument, objective


HELP = "say which kernels, stages, ranks and shared factors a figure of the step time depends on"


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
    from ._load import load

    job = load(arguments.job, arguments.overrides)  # Bad input fails before JAX starts.

    import jax

    from ..analysis import sensitivity

    wanted = objective(arguments.objective)
    use_all_cores()
    found = sensitivity(
        job.compile(),
        wanted,
        num_samples=arguments.samples,
        key=jax.random.key(arguments.seed),
        shapley=[name.strip() for name in arguments.shapley.split(",") if name.strip()],
    )
    result = {"job": job.name, **dataclasses.asdict(found)}
    return result, _text(job.name, found, arguments.top)


def _text(name: str, found, top: int) -> str:
    unit = found.unit if found.unit != "1" else ""
    lines = [
        f"{name}: {found.objective} = {found.value:.5g} +- {found.value_error:.2g} {unit}".rstrip(),
        "",
        f"{'in ' + found.unit:<24}{'mean':>11}{'spread':>11}{'+-':>9}{'gain':>11}{'+-':>9}",
    ]

    def cell(value: float | None, width: int, digits: str = "4g") -> str:
        return f"{'-' if value is None else format(value, f'.{digits}'):>{width}}"

    for part in found.parts[:top]:
        cells = cell(part.mean, 11), cell(part.spread, 11), cell(part.spread_error, 9, "1g")
        cells += cell(part.gain, 11), cell(part.gain_error, 9, "1g")
        lines.append(f"{part.name:<24}{''.join(cells)}")
    total, whole = found.sum_of_gains, found.whole_gain
    lines += [
        "",
        "mean, spread: what a part's latency and variability cost, to first order; gain: without "
        "its variability",
        f"all variability together: {whole[0]:.4g} +- {whole[1]:.1g}; the sum of the gains of "
        f"kernels, factors and stalls: {total[0]:.4g} +- {total[1]:.1g}",
    ]
    lines += [
        f"Shapley value of {name}: {value:.4g} +- {error:.1g}"
        for name, (value, error) in found.shapley.items()
    ]
    lines.append(f"{found.num_samples:,} steps in {found.num_batches} batches")
    return "\n".join(lines)
