"""Published steps as jobs: the rows of `published/` and `steps/`, and systems of MLPerf Training.

A row that cannot be written as a job is kept, with the reason.
"""

import pathlib
from collections.abc import Iterator

import msgspec

from prism_jax import data

from ._published_experts import systems_with_experts
from ._published_jobs import name_of, of_steps, table_of
from ._published_others import of_family, of_vtrain
from ._rows import attempt, job_of, number, read


FAMILIES = "MLPerf families"


class Published(msgspec.Struct, frozen=True):
    """A published step.

    **Attributes:**

    - `table`: which of the tables it belongs to.
    - `name`: what it is called in messages.
    - `seconds`: its mean; its median where `median` says so.
    - `job`: the same, or `None`.
    - `reason`: why there is no job.
    - `median`: whether a median was published.
    - `family`: the rows that are left out together when a law is fitted; by default the table.
    """

    table: str
    name: str
    seconds: float
    job: data.Job | None = None
    reason: str = ""
    median: bool = False
    family: str = ""


def published(folder: pathlib.Path) -> Iterator[Published]:
    """All rows of a folder like `../shared/data`."""
    for row in _rows_of_steps(folder):
        yield _expressed(table_of(row), name_of(row), of_steps, row)
    for which in ("single", "multi"):
        table = f"vTrain, Megatron-DeepSpeed, A100, {which} node"
        for row in read(folder / "published" / f"a100_megatron_deepspeed_{which}_node.csv"):
            name = ", ".join(filter(None, row.values()))
            yield _expressed(table, name, of_vtrain, row, "iteration time (ms)", 1000)
    for row in read(folder / "mlperf" / "scaling_families.csv"):
        one = _expressed(FAMILIES, row["system"], of_family, row, "p50")
        yield msgspec.structs.replace(one, median=True)
    for row in systems_with_experts(folder / "mlperf_v6"):
        one = _expressed(table_of(row), row["system"], of_steps, row)
        yield msgspec.structs.replace(one, median=True)


def _rows_of_steps(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of both tables of steps, without those of the first that the second completes."""
    further = read(folder / "steps" / "step_means.csv")
    completed = {(row["measured_steps_row"].removesuffix(".0"), row["model"]) for row in further}
    rows = enumerate(read(folder / "published" / "measured_steps.csv"))
    return [row for i, row in rows if (str(i), row["model"]) not in completed] + further


def _expressed(table, name, function, row, column="step_time_s", per_second=1) -> Published:
    time = number(row[column])
    if time is None:
        reason = f"its time is {row[column]}, no number above 0" if row[column] else "no step time"
        return Published(table, name, 0.0, reason=reason)
    job, reason = attempt(job_of, function, row)
    family = row.get("family") or table if job else ""
    return Published(table, name, time / per_second, job, reason, family=family)
