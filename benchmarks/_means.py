"""Means of published steps, predicted from configuration alone, and their errors by table.

A fault in a kernel table causes an error in all rows of its machine, so the tables name machines.
Rows that cannot be written as a job are counted with the reason.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._published import published
from ._rows import predicted, reason_lines
from ._tables import by, percent, table


# What variability adds to a mean: the median over 60 of these jobs, two of each table; 1.008 to
# 1.027. A simulation of each would take a quarter of an hour.
VARIABILITY = 1.014


def mean_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each published step below a folder. One that cannot be written as a job has a
    `reason`."""
    for one in published(folder):
        row: dict[str, Any] = {"table": one.table, "name": one.name, "measured": one.seconds}
        mean, reason = predicted(one.job, one.reason)
        yield row | ({"predicted": VARIABILITY * mean} if mean else {"reason": reason})


def mean_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    expressed = [row for row in rows if "predicted" in row]
    cells = []
    for name, mine in sorted(by("table", expressed).items()):
        errors = np.array([row["predicted"] / row["measured"] - 1 for row in mine])
        worst = percent(errors[np.argmax(np.abs(errors))])
        size = f"{100 * np.abs(errors).mean():.1f} %"
        cells.append((name, len(errors), percent(errors.mean()), size, worst))
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    lines = [f"{len(expressed):,} of {len(rows):,} rows can be written as jobs."]
    if reasons := reason_lines(rows):
        lines = [f"{lines[0]} The others cannot, for these reasons:", ""]
    return "\n".join([table(header, cells), "", *lines, *reasons])
