"""CPU time of `predict` in a process that has predicted the same job before."""

import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import prism_jax as prism

from ._published import published
from ._tables import table


_JOBS = ("gpt3-175b-h100-4096", "llama-3-405b-h100-16384")
_CALLS = 3  # The shortest of so many counts, because other work on the machine only adds.


def time_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for two shipped jobs and for each published step below a folder, in seconds."""
    jobs = [(name, prism.load_job(name)) for name in _JOBS]
    jobs += [(one.table, one.job) for one in published(folder) if one.job]
    for name, job in jobs:
        prism.predict(job)  # Builds the graph of its schedule.
        starts = [time.process_time()]
        for _ in range(_CALLS):
            prism.predict(job)
            starts.append(time.process_time())
        yield {"name": name, "seconds": float(np.diff(starts).min())}


def time_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    cells = [(row["name"], f"{1e3 * row['seconds']:.1f}") for row in rows[: len(_JOBS)]]
    seconds = [row["seconds"] for row in rows[len(_JOBS) :]]
    middle = 1e3 * float(np.median(seconds or [np.nan]))
    cells.append((f"the {len(seconds):,} published steps, median", f"{middle:.1f}"))
    return table(("`predict` of", "CPU ms"), cells)
