"""Writing a job as a file."""

import os
import pathlib
from typing import Any

import msgspec

from ._find import list_names
from ._job import Job
from ._load import load_cluster, load_model
from ._read import without_none


def save_job(job: Job, path: str | os.PathLike) -> None:
    """Writes a job as a `.toml` file that `load_job` reads.

    A shipped model or cluster is written by its name, any other in full. Of the kernels, only what
    `calibrated` says is written.

    **Raises:**

    `ValueError` where the path is a folder or does not end in `.toml`.
    """
    import tomli_w

    path = pathlib.Path(path)
    if path.suffix != ".toml" or path.is_dir():
        raise ValueError(f"{path}: give a file that ends in `.toml` to write the job to.")
    table: dict[str, Any] = msgspec.to_builtins(job)
    del table["kernels"]
    if job.model is not None and _is_shipped("jobs/models", job.model, load_model):
        table["model"] = job.model.name
    if job.cluster is not None and _is_shipped("hardware/clusters", job.cluster, load_cluster):
        table["cluster"] = job.cluster.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps({"kind": "job", **without_none(table)}))


def _is_shipped(kind: str, part: Any, load: Any) -> bool:
    return part.name in list_names(kind) and load(part.name) == part
