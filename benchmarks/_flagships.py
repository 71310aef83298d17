"""Shipped jobs of well-known runs, beside what was published of them."""

import pathlib
from typing import Any

import prism_jax as prism
from prism_jax.data import list_jobs

from ._means import VARIABILITY
from ._tables import percent, table


# A job of the size of another's, and jobs whose rows `means` has by family.
_NOT = ("llama-3.1-405b-h100-65536", "dit-xl-2-a100-8", "latte-xl-2-a100-8")


def flagship_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each shipped job with a measured mean or median; `folder` is not read."""
    found = []
    for name in list_jobs():
        job = prism.load_job(name)
        measured = job.measured and (job.measured.mean_s or job.measured.p50_s)
        if measured and name not in _NOT:
            low, high = prism.expected_error(job).interval()
            mean = prism.predict(job).mean
            row = {"job": name, "measured": measured, "predicted": VARIABILITY * mean}
            found.append({**row, "low": low * mean, "high": high * mean})
    return found


def flagship_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("job", "published (s)", "predicted (s)", "error", "90 % interval (s)")
    cells = (
        (
            row["job"],
            *(f"{row[name]:.4g}" for name in ("measured", "predicted")),
            percent(row["predicted"] / row["measured"] - 1),
            f"{row['low']:.4g} .. {row['high']:.4g}",
        )
        for row in rows
    )
    return table(header, cells)
