"""Saves jobs."""

import os
import pathlib
from typing import Any

import msgspec

from .._files import check_writable, shown
from ._find import list_names
from ._hardware import Cluster
from ._job import Job
from ._load import load_cluster, load_model
from ._read import write_toml


def check_job_path(path: str | os.PathLike[str]) -> None:
    """Checks that a job can be saved under a path, before the job is computed.

    **Raises:**

    `ValueError` if the path does not end in `.toml`, or if nothing can be written there.
    """
    if not os.fspath(path).endswith(".toml") or os.path.isdir(path):
        raise ValueError(f"{shown(path)}: give a file that ends in `.toml` to write the job to.")
    folder = pathlib.Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise ValueError(
            f"{shown(path)}: nothing can be written there ({error.strerror}); give another file."
        ) from None


def save_job(job: Job, path: str | os.PathLike[str]) -> None:
    """Writes a job to a `.toml` file that `load_job` reads. A file that is already there is
    replaced.

    A shipped model is written by its name, a shipped cluster by its family and number of nodes;
    other models and clusters are written in full, without the `group` of a network that joins all
    devices. Of the kernels, only the changes in `calibrated` are written.

    **Raises:**

    `ValueError` if the path does not end in `.toml`, or if nothing can be written there.
    """
    check_job_path(path)
    table: dict[str, Any] = msgspec.to_builtins(job)
    del table["kernels"]
    if job.model is not None and _is_shipped("jobs/models", job.model, load_model):
        table["model"] = job.model.name
    cluster = job.cluster
    if cluster is not None and _is_shipped(
        "hardware/clusters", cluster, lambda name: load_cluster(name, cluster.num_nodes)
    ):
        table |= {"cluster": cluster.name, "num_nodes": cluster.num_nodes}
    elif cluster is not None and len(cluster.links) > 1 and _joins_all(cluster):
        # Without `group` it joins all devices, for any number of nodes; a single link may be that
        # of a node.
        del table["cluster"]["links"][-1]["group"]
    write_toml(pathlib.Path(path), "job", table)


def _joins_all(cluster: Cluster) -> bool:
    return cluster.links[-1].group == cluster.num_devices


def _is_shipped(kind: str, part: Any, load: Any) -> bool:
    return part.name in list_names(kind) and load(part.name) == part
