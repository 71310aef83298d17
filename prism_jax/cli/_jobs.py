from typing import Any

from .. import data
from .._summary import Column, Table, plain
from ._options import SOURCES, Given, Output, command


@command("--sources", SOURCES, csv=True)
def run(given: Given) -> Output:
    """List the shipped jobs."""
    jobs = [_row(data.load_job(name)) for name in data.list_jobs()]
    columns = (
        Column("job", "name"),
        Column("GPUs", "world_size", "d"),
        "model",
        "cluster",
        Column("layout", _layout),
        "schedule",
        Column("measured", _measured, unit="s"),
    )
    sources = [f"{job['name']}: {job['source']}" for job in jobs if given.sources]
    return Output({"jobs": jobs}, [Table(columns, jobs, most=None), "\n".join(sources)])


def _row(job: data.Job) -> dict[str, Any]:
    measured = {} if job.measured is None else plain(job.measured)
    return {
        "name": job.name,
        "world_size": job.layout.world_size,
        "model": job.model.name if job.model else "",
        "cluster": job.cluster.name if job.cluster else "",
        "layout": plain(job.layout),
        "schedule": job.schedule.kind,
        "num_microbatches": job.schedule.num_microbatches,
        "measured": {name: value for name, value in measured.items() if value is not None},
        "source": job.source,
    }


def _layout(row: dict[str, Any]) -> str:
    return " ".join(f"{name}{row['layout'][name]}" for name in ("tp", "pp", "dp", "cp", "ep"))


def _measured(row: dict[str, Any]) -> Any:
    return row["measured"].get("mean_s", row["measured"].get("p50_s", ""))
