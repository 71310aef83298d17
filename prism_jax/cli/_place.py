"""`prism-jax place`: assigns nodes to pipeline ranks and replicas."""

import argparse
from typing import Any

from .._files import shown
from ._arguments import (
    add_job_argument,
    add_oom_argument,
    add_progress_argument,
    add_seed_argument,
    add_set_argument,
    check_out,
    count,
)
from ._json import plain
from ._objective import add_objective_argument, objective, with_unit


# Each has a factor of its own.
_MOST_GPUS = 10_000_000

HELP = "assign nodes to pipeline ranks and replicas by their speed, to lower the step time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    parser.add_argument(
        "--factors",
        metavar="FILE",
        help="how slow each GPU, or each node, is: a .csv or .parquet file with a column `factor`, "
        "and `gpu` or `node`; without a file, factors are drawn from the job's law",
    )
    parser.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="steps to simulate for each figure (4096, or at least 512 for large jobs)",
    )
    parser.add_argument("--out", metavar="FILE", help="a .csv file to write the placement to")
    add_objective_argument(parser)
    add_seed_argument(parser)
    add_set_argument(parser)
    add_oom_argument(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..trace import read_factors
    from ._load import compiled, load

    check_out(arguments.out, ".csv")  # Bad input fails before JAX starts.
    job = load(arguments)
    factors, of = (None, None) if arguments.factors is None else read_factors(arguments.factors)

    import jax
    import numpy as np

    from ..placement import place

    wanted = objective(arguments.objective)
    if job.layout.world_size > _MOST_GPUS:
        raise ValueError(
            f"{shown(arguments.job)}: it has {job.layout.world_size:,} GPUs; up to {_MOST_GPUS:,} "
            "can be placed."
        )
    program, options = compiled(arguments, job)
    of_factors, options["key"] = jax.random.split(options["key"])
    if factors is None:
        rank = program.variability.rank
        if rank is None:
            raise ValueError(
                f"{shown(arguments.job)}: the GPUs of this job do not differ; give measured "
                "--factors."
            )
        factors = np.asarray(rank.from_normal(jax.random.normal(of_factors, (program.world_size,))))
    devices = 8 if job.job is None else job.job.cluster.devices_per_node
    expected = {"gpu": program.world_size, "node": program.world_size // devices}
    if of is not None and len(factors) != expected[of]:
        raise ValueError(
            f"{shown(arguments.factors or '')}: it has {len(factors)} rows by `{of}`; the job has "
            f"{expected['gpu']} GPUs in {expected['node']} nodes."
        )
    found = place(program, factors, devices_per_node=devices, objective=wanted, **options)
    if arguments.out is not None:
        found.table().write_csv(arguments.out)
    result = {
        "job": job.name,
        "objective": found.objective,
        "unit": found.unit,
        **{name: plain(getattr(found, name)) for name in _FIGURES},
        "order": found.order.tolist(),
        "num_samples": found.num_samples,
        "num_placements": found.num_placements,
    }
    return result, _text(job.name, found, arguments.out)


_FIGURES = {
    "before": "as given",
    "after": "placed",
    "gain": "gain",
    "worst": "the worst found",
    "bound": "no placement is below",
}


def _text(name: str, found, out: str | None) -> str:
    lines = [f"{name}: {found.objective} of {len(found.order):,} nodes", ""]
    for field, label in _FIGURES.items():
        figure = getattr(found, field)
        if figure is not None:  # An objective that may fall when steps get longer has no bound.
            lines.append(f"{label:<24}{with_unit(figure, found.unit)}")
    lines += ["", f"{found.num_samples:,} steps; {found.num_placements:,} placements were tried"]
    if out is not None:
        lines.append(f"the node for each place: {out}")
    return "\n".join(lines)
