"""Steps on machines of other vendors, `steps/more_machines.csv`: each chip has at most three
constants of its own (`kernels/mi355x`, `kernels/tpu-v6e`, ...), chosen for the rows that are there.

A block of MLPerf on TPUs trains and then evaluates. Its evaluation is a step with forwards alone.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

import prism_jax as prism
from prism_jax.workload import has_experts

from .means import VARIABILITY
from .published import Published, of_other_machines
from .rows import predicted, reason_lines
from .tables import Folder, Row, by, error_of, percent, table, table_of


# The chips that are scored, and the level of their intervals.
_SCORED = re.compile(r"MI3\d\dX|TPU")
_LEVEL = 0.9
_EVALUATED = re.compile(r"trains \d+ steps \(([\d,]+) sequences\) and then evaluates ([\d,]+)")


def machine_rows(folder: Folder) -> dict[str, list[Row]]:
    """The steps of a folder like `../shared/data`.

    **Returns:**

    `rows` of chips of AMD and Google: the chip as `table`, the `name` of the step, its `measured`
    and `predicted` seconds, and the 90 % interval of these, `low` to `high`. `others` are those of
    other machines, and `refused` what cannot be expressed as a job, each with the `reason`.
    """
    parts: dict[str, list[Row]] = {"rows": [], "others": [], "refused": []}
    for step, seconds, reason in timed_steps(folder):
        row = {"table": step.device, "name": step.name, "measured": step.seconds}
        if not seconds:
            parts["refused"].append(row | {"reason": reason})
            continue
        job: Any = step.job
        low, high = prism.expected_error(job).interval(_LEVEL)
        row["table"] = job.cluster.device.title
        row |= {"predicted": VARIABILITY * seconds, "low": low * seconds, "high": high * seconds}
        row["kind"] = "experts" if has_experts(job.model) else "dense"
        parts["rows" if is_scored(step) else "others"].append(row)
    return parts


def timed_steps(folder: Folder) -> Iterator[tuple[Published, float, str]]:
    """The steps of other machines with what `predict` says in seconds, or the reason why not."""
    for step in of_other_machines(folder):
        yield step, *_seconds(step)


def is_scored(step: Published) -> bool:
    """Whether a step with a job is one of a chip that has constants."""
    job: Any = step.job
    return bool(_SCORED.match(job.cluster.device.title))


def _seconds(step: Published) -> tuple[float, str]:
    """The predicted seconds, with the evaluation of a block of steps; or why there are none."""
    mean, reason = predicted(step.job, step.reason)
    evaluated = _EVALUATED.search(step.note)
    if not mean or not evaluated:
        return mean, reason
    trained, forwards = (int(number.replace(",", "")) for number in evaluated.groups())
    job: Any = step.job
    training = msgspec.structs.replace(job.training, forward_only=True)
    evaluation, reason = predicted(msgspec.structs.replace(job, training=training))
    return (mean + evaluation * forwards / trained, "") if evaluation else (0.0, reason)


def machine_table(parts: dict[str, list[Row]]) -> str:
    """In Markdown: all steps, mean absolute errors by chip, and what intervals hold."""
    columns = {"published step": "{table}: {name}", "measured (s)": "{measured:.4g}"}
    columns |= {"predicted (s)": "{predicted:.4g}", "error": "{error:+.0%}"}
    rows, lines = parts["rows"], [table_of(parts["rows"] + parts["others"], columns), ""]
    cells = []
    for kind, of_kind in [*sorted(by("kind", rows).items()), *[("all", rows)] * bool(rows)]:
        for name, of_chip in [*sorted(by("table", of_kind).items()), ("all", of_kind)]:
            errors = np.array([error_of(row) for row in of_chip])
            inside = np.mean([row["low"] <= row["measured"] <= row["high"] for row in of_chip])
            width = np.median([(row["high"] - row["low"]) / row["predicted"] for row in of_chip])
            size = percent(np.abs(errors).mean(), form=".1")
            shares = percent(float(inside), form=".0"), percent(float(width), form=".0")
            cells.append((kind, name, len(errors), percent(float(errors.mean())), size, *shares))
    header = ("steps", "chip", "rows", "mean error", "mean absolute error", "inside 90 %", "width")
    lines += [table(header, cells), "", f"{len(parts['refused'])} rows cannot be written as jobs:"]
    return "\n".join([*lines, *reason_lines(parts["refused"])])
