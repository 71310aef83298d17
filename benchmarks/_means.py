"""Means of published steps, predicted from configuration alone, and their errors by table.

A fault in a kernel table causes an error in all rows of its machine, so the tables name machines.
Rows that cannot be written as a job are counted with the reason.
"""

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._published import Published, published


_SAMPLES = 1024  # The mean of so many steps is within 0.1 % of that of all.


def mean_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A row for each published step of a folder `published` and of `mlperf` beside it. A row that
    cannot be written as a job has a `reason`."""
    for one in published(folder.parent):
        row: dict[str, Any] = {"table": one.table, "name": one.name, "measured_s": one.seconds}
        if one.job is None:
            yield {**row, "reason": one.reason}
        else:
            predicted = _predicted(one)
            yield {**row, "predicted_s": predicted, "error": predicted / one.seconds - 1}


def job_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """As `mean_rows`, without a prediction."""
    for one in published(folder.parent):
        row = {"table": one.table, "name": one.name, "measured_s": one.seconds}
        yield row if one.job else {**row, "reason": one.reason}


def _predicted(one: Published) -> float:
    import jax

    import prism_jax as prism

    assert one.job is not None
    program = prism.compile_job(one.job)
    law = prism.simulate(program, num_samples=_SAMPLES, key=jax.random.key(0))
    return float(law.quantile(0.5)) if one.median else law.mean


def mean_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    header = ("published runs", "rows", "mean error", "mean absolute error", "worst")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    expressed = [row for row in rows if "error" in row]
    for table in sorted({row["table"] for row in expressed}):
        errors = 100 * np.array([row["error"] for row in expressed if row["table"] == table])
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
    reasons = Counter(row["reason"] for row in rows if "reason" in row)
    jobs = len(rows) - reasons.total()
    lines = [f"{jobs:,} of {len(rows):,} rows can be written as jobs."]
    if reasons:
        lines = [f"{lines[0]} The others cannot, for these reasons:", ""]
    return [*lines, *(f"- {count}: {reason}" for reason, count in reasons.most_common())]
