"""`prism-jax criticality`: where the critical path runs."""

import argparse
from typing import Any

from .._misc import counted, quoted
from ._arguments import add_job_arguments, count


HELP = "print how often each rank, stage and op is critical, and how much communication is exposed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--of",
        choices=("ranks", "stages", "ops"),
        default="ranks",
        help="print a table of ranks, stages or ops (ranks)",
    )
    parser.add_argument(
        "--band",
        default="0:1",
        metavar="A:B",
        help="use only steps between two quantiles, such as 0.94:0.96 for p95 (0:1)",
    )
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="how many rows to print (10)"
    )


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ._load import compiled, load

    job = load(arguments)  # Bad input fails before JAX starts.
    band = _band(arguments.band)

    import numpy as np

    from ..analysis import criticality

    program, options = compiled(arguments, job)
    found = criticality(program, band=band, **options)
    table = found.table(arguments.of)

    def quantiles(shares) -> dict[str, float]:
        found = {f"p{level:g}": float(np.quantile(shares, level / 100)) for level in (5, 50, 95)}
        return {"mean": float(np.mean(shares)), **found}

    exposed = quantiles(found.exposed_communication)
    data_parallel = quantiles(found.exposed_data_parallel)
    result = {
        "job": job.name,
        "band": band,
        arguments.of: table.to_dicts(),
        "exposed_communication": exposed,
        "exposed_data_parallel": data_parallel,
        "num_steps": found.num_steps,
        "num_replicas_seen": found.num_replicas_seen,
        "notes": list(found.notes),
    }
    lines = [f"{job.name}: {arguments.of} on the critical path", ""]
    lines.append("".join(f"{name:>16}" for name in table.columns))
    for row in table.head(arguments.top).rows():
        lines.append("".join(f"{x:>16.4g}" if isinstance(x, float) else f"{x:>16}" for x in row))
    lines.append("")
    for what, shares in (("", exposed), (" of data parallelism", data_parallel)):
        text = ", ".join(f"{100 * x:.2f} % ({name})" for name, x in shares.items())
        lines.append(f"exposed communication{what}, of a step: {text}")
    seen = counted(round(found.num_replicas_seen), "replica")
    lines.append(f"{counted(found.num_steps, 'step')}, decided by {seen}")
    return result, "\n".join([*lines, *found.notes])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each rank, stage or op of the requested table."""
    return next(result[name] for name in ("ranks", "stages", "ops") if name in result)


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(
            f"--band `{quoted(text)}` must be two quantiles, such as 0.94:0.96."
        ) from None
