"""Means of published steps, predicted from configuration alone, and their errors by table.

A fault in a kernel table causes an error in all rows of its machine, so the tables name machines.
Rows that cannot be written as a job are counted with the reason.
"""

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._published import published
from ._rows import predicted, reason_lines


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


def job_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """As `mean_rows`, without a prediction."""
    for one in published(folder):
        row = {"table": one.table, "name": one.name, "measured": one.seconds}
        yield row if one.job else {**row, "reason": one.reason}


def mean_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    expressed = [row for row in rows if "predicted" in row]
    for table in sorted({row["table"] for row in expressed}):
        mine = [row for row in expressed if row["table"] == table]
        errors = 100 * np.array([row["predicted"] / row["measured"] - 1 for row in mine])
        worst = errors[np.argmax(np.abs(errors))]
        cells = (table, str(len(errors)), f"{errors.mean():+.1f} %")
        cells += (f"{np.abs(errors).mean():.1f} %", f"{worst:+.1f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_count_lines(rows)])


def count_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown: how many rows of each table can be written as jobs, and why others cannot."""
    tables = Counter(row["table"] for row in rows if "reason" not in row)
    lines = [f"| {table} | {count} |" for table, count in sorted(tables.items())]
    return "\n".join(["| published runs | rows |", "|---|---|", *lines, "", *_count_lines(rows)])


def _count_lines(rows: list[dict[str, Any]]) -> list[str]:
    reasons = reason_lines(rows)
    jobs = sum("reason" not in row for row in rows)
    lines = [f"{jobs:,} of {len(rows):,} rows can be written as jobs."]
    if reasons:
        lines = [f"{lines[0]} The others cannot, for these reasons:", ""]
    return [*lines, *reasons]
