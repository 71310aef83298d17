"""`prism-jax memory`: the peak memory of the GPUs of each pipeline rank."""

import argparse
from typing import Any

from ._arguments import add_set_argument
from ._catalogue import table


HELP = "print the peak memory of each pipeline rank, by part"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", help="a shipped job (`prism-jax jobs`), or a .toml file"
    )
    add_set_argument(parser)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each pipeline rank."""
    return result["ranks"]


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import load_job

    job = load_job(arguments.job, arguments.overrides)

    from ..prediction import memory

    found = memory(job)
    listed = [{"rank": r.rank, "bytes": r.bytes, "parts": r.parts} for r in found.ranks]
    names = list(dict.fromkeys(name for rank in found.ranks for name in rank.parts))
    header = ("rank", "GB", *names)
    rows = [
        (r.rank, f"{r.bytes / 1e9:.2f}", *(f"{r.parts.get(n, 0) / 1e9:.2f}" for n in names))
        for r in found.ranks
    ]
    assert job.cluster is not None
    fits = "fits" if found.fits else "does not fit"
    text = (
        f"{table(header, rows)}\n\n{job.name} {fits} {job.cluster.device.name}, which has "
        f"{found.device_bytes / 1e9:.1f} GB."
    )
    result = {"ranks": listed, "device_bytes": found.device_bytes, "fits": found.fits}
    return result, text
