"""Published steps as jobs: the rows of `published/` and `steps/`, and systems of MLPerf Training.

A row that cannot be written as a job is kept, with the reason.
"""

import csv
import pathlib
from collections.abc import Iterator

import msgspec

from prism_jax import data
from prism_jax.workload import check_split

from ._published_experts import systems_with_experts
from ._published_jobs import name_of, of_steps, table_of
from ._published_others import of_family, of_vtrain


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
        seconds = float(row["step_time_s"]) if row["step_time_s"] else None
        yield _expressed(table_of(row), name_of(row), seconds, of_steps, row)
    for which in ("single", "multi"):
        path = folder / "published" / f"a100_megatron_deepspeed_{which}_node.csv"
        table = f"vTrain, Megatron-DeepSpeed, A100, {which} node"
        for row in read(path):
            seconds = float(row["iteration time (ms)"]) / 1000
            yield _expressed(table, ", ".join(row.values()), seconds, of_vtrain, row)
    for row in read(folder / "mlperf" / "scaling_families.csv"):
        one = _expressed(FAMILIES, row["system"], float(row["p50"]), of_family, row)
        yield msgspec.structs.replace(one, median=True)
    for row in systems_with_experts(folder / "mlperf_v6"):
        seconds = float(row["step_time_s"])
        one = _expressed(table_of(row), row["system"], seconds, of_steps, row)
        yield msgspec.structs.replace(one, median=True)


def _rows_of_steps(folder: pathlib.Path) -> list[dict[str, str]]:
    """The rows of both tables of steps, without those of the first that the second completes."""
    further = read(folder / "steps" / "step_means.csv")
    completed = {
        (int(row["measured_steps_row"]), row["model"])
        for row in further
        if row["measured_steps_row"]
    }
    rows = enumerate(read(folder / "published" / "measured_steps.csv"))
    return [row for i, row in rows if (i, row["model"]) not in completed] + further


def read(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it is missing."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _expressed(table, name, seconds, job_of, row) -> Published:
    try:
        if seconds is None:
            raise ValueError("no step time")
        job = job_of(row)
        assert job.model is not None
        assert job.training is not None
        check_split(job.model, job.layout, job.schedule, job.training)
    except ValueError as error:
        return Published(table, name, seconds or 0.0, reason=str(error))
    return Published(table, name, seconds, job, family=row.get("family") or table)
