"""Loading jobs, models and machines by name or path."""

import os
import pathlib
from collections.abc import Iterable
from typing import Any

import msgspec

from .._files import shown
from .._misc import quoted
from ._calibrated import apply_calibrated
from ._check import check_cluster, check_job
from ._find import find_file, is_path, list_names
from ._hardware import Cluster, Device
from ._job import Job
from ._load_kernels import load_kernels
from ._model import Model, check_model
from ._override import Override, apply_kernel_override, apply_override, parse_override
from ._plausible import check_plausible
from ._read import check_keys, convert, read_toml
from ._sized import sized
from ._software import load_software


def list_jobs() -> tuple[str, ...]:
    """The names of the shipped jobs."""
    return list_names("jobs")


def list_models() -> tuple[str, ...]:
    """The names of the shipped models."""
    return list_names("jobs/models")


def list_devices() -> tuple[str, ...]:
    """The names of the shipped devices."""
    return list_names("hardware/devices")


def list_clusters() -> tuple[str, ...]:
    """The names of the shipped families of clusters."""
    return list_names("hardware/clusters")


def list_kernels() -> tuple[str, ...]:
    """The names of the shipped profiles of kernels: of devices and of clusters."""
    return list_names("kernels")


def load_model(name: str | os.PathLike[str]) -> Model:
    """Loads a model by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    model = _load("jobs/models", "model", name, Model, None)[0]
    check_model(model, shown(name))
    return model


def load_device(name: str | os.PathLike[str]) -> Device:
    """Loads a device by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    return _load("hardware/devices", "device", name, Device, None)[0]


def load_cluster(name: str | os.PathLike[str], num_nodes: int | None = None) -> Cluster:
    """Loads a cluster and its device by the name of a shipped family, or by the path of a file.

    **Arguments:**

    - `name`: the name of a family, or the path of a file.
    - `num_nodes`: the number of nodes. A family needs it; a file may give it itself.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("hardware/clusters", name)
    return _cluster_of(_cluster_table(path), shown(path), num_nodes)


def load_job(name_or_path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Job:
    """Loads a job with its model, cluster, device and kernels.

    **Arguments:**

    - `name_or_path`: the name of a shipped job, or the path of a file of `kind = "job"`.
    - `overrides`: changes to the job, such as `"layout.dp=64"`, `"cluster.num_nodes=600"` or
        `"kernels.all_gather.sigma=0.1"`: each is a dotted key of the complete job and its value in
        TOML, where a bare word is a string. `model`, `cluster` and `cluster.device` also accept
        names.

    **Returns:**

    The job.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key, or the override.
    """
    path = find_file("jobs", name_or_path)
    return make_job(read_toml(path, "job"), path, overrides)


def make_job(raw: dict[str, Any], path: pathlib.Path, overrides: Iterable[str] = ()) -> Job:
    """`load_job`, for the table of a file at `path`, which need not exist."""
    if isinstance(overrides, str):
        overrides = (overrides,)
    parsed = [parse_override(text) for text in overrides]
    if "kernels" in raw:
        raise ValueError(
            f"{shown(path)}: the key `kernels` is for overrides; a file names a profile as "
            "`kernels` of its cluster and device."
        )
    changes = []
    for override in parsed:
        if override.keys in (("model",), ("cluster",)):
            raw[override.key] = override.value
        elif override.keys == ("training", "software") and isinstance(raw.get("training"), dict):
            raw["training"]["software"] = override.value
        elif override.keys == ("num_nodes",):
            changes.append(msgspec.structs.replace(override, keys=("cluster", "num_nodes")))
        elif override.keys[0] != "kernels":
            changes.append(override)
    num_nodes = raw.pop("num_nodes", None)
    check_keys(raw, Job, lambda key: shown(path))
    if num_nodes is not None and "cluster" not in raw:
        raise ValueError(
            f"{shown(path)}: `num_nodes` belongs to a cluster, but there is none; add `cluster`, "
            "or leave `num_nodes` out."
        )
    origin = {override.key: override for override in parsed}

    def where(key: str) -> str:
        while key:
            if key in origin:
                return f"override `{origin[key]}`"
            key = key.rpartition(".")[0]
        return shown(path)

    _resolve(raw, path, changes, num_nodes)
    for override in changes:
        origin[apply_override(raw, override)] = override
    if isinstance(raw.get("cluster"), dict):
        raw["cluster"] = _sized(raw["cluster"], shown(path))
    raw.setdefault("name", quoted(path.stem))
    _call_dtypes_by_their_names(raw.get("training"))
    job = convert(raw, Job, where)
    if job.cluster is not None:
        check_cluster(job.cluster, shown(path))
        if not job.allow_implausible:
            check_plausible(job.cluster, shown(path))
        kernels = load_kernels(job.cluster)
        if job.calibrated is not None:
            kernels = apply_calibrated(kernels, job.calibrated, f"{shown(path)}, `calibrated`")
        job = msgspec.structs.replace(job, kernels=kernels)
    for override in parsed:
        if override.keys[0] == "kernels":
            if job.kernels is None:
                raise ValueError(
                    f"override `{override}`: the job `{job.name}` names no cluster, so it has "
                    "no kernels."
                )
            kernels = apply_kernel_override(job.kernels, override)
            job = msgspec.structs.replace(job, kernels=kernels)
    check_job(job, shown(path))
    return job


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}


def _call_dtypes_by_their_names(training: Any) -> None:
    """Replaces PyTorch's names of dtypes, in place."""
    for key in ("dtype", "gradient_dtype"):
        if isinstance(training, dict) and isinstance(training.get(key), str):
            training[key] = _DTYPES.get(training[key].removeprefix("torch."), training[key])


def _resolve(
    raw: dict[str, Any], path: pathlib.Path, changes: list[Override], num_nodes: Any
) -> None:
    """Replaces names of models, clusters and devices by their tables, in place."""
    training = raw.get("training")
    if isinstance(training, dict) and isinstance(training.get("software"), str):
        raw["training"] = {**load_software(training["software"], path).training, **training}
    if isinstance(raw.get("model"), str):
        raw["model"] = _load("jobs/models", "model", raw["model"], Model, path)[1]
    if isinstance(raw.get("cluster"), str):
        of_cluster = find_file("hardware/clusters", raw["cluster"], path)
        raw["cluster"] = _cluster_table(of_cluster)
        _cluster_of({"num_nodes": 1, **raw["cluster"]}, shown(of_cluster))
    cluster = raw.get("cluster")
    if not isinstance(cluster, dict):
        return
    if num_nodes is not None:
        cluster["num_nodes"] = num_nodes
    for override in list(changes):
        if override.keys == ("cluster", "device"):
            cluster["device"] = override.value
            changes.remove(override)
    if isinstance(cluster.get("device"), str):
        cluster["device"] = _load("hardware/devices", "device", cluster["device"], Device, path)[1]
    for override in changes:
        if override.keys[:3] == ("cluster", "device", "power"):
            _check_power(cluster.get("device"), override)


def _check_power(device: Any, override: Override) -> None:
    """Raises a `ValueError` if an override is about the power of a device without any."""
    if isinstance(device, dict) and "power" not in device:
        known = (name for name in list_devices() if load_device(name).power)
        raise ValueError(
            f"override `{override}`: what the device `{quoted(device.get('name', ''))}` draws is "
            f"not known; take {', '.join(known)}, or add `[power]` to the device's file."
        )


def _cluster_table(path: pathlib.Path) -> dict[str, Any]:
    """The table of a cluster, with that of its device."""
    raw = _beside(read_toml(path, "cluster"), path)
    if isinstance(raw.get("device"), str):
        raw["device"] = _load("hardware/devices", "device", raw["device"], Device, path)[1]
    raw.setdefault("name", quoted(path.stem))
    return raw


def _beside(raw: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The table of a file, where a path of kernels is seen from the folder of the file."""
    kernels = raw.get("kernels")
    if isinstance(kernels, str) and is_path(kernels):
        raw["kernels"] = os.path.abspath(path.parent / kernels)
    return raw


def _cluster_of(raw: dict[str, Any], where: str, num_nodes: int | None = None) -> Cluster:
    cluster = convert(_sized(raw, where, num_nodes), Cluster, lambda key: where)
    check_cluster(cluster, where)
    return cluster


def _sized(raw: dict[str, Any], where: str, num_nodes: int | None = None) -> dict[str, Any]:
    try:
        return sized(raw, num_nodes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from None


def _load(
    kind: str, what: str, name: str | os.PathLike[str], cls: Any, given_by: pathlib.Path | None
) -> tuple[Any, dict[str, Any]]:
    path = find_file(kind, name, given_by)
    raw = _beside(read_toml(path, what), path)
    raw.setdefault("name", quoted(path.stem))
    return convert(raw, cls, lambda key: shown(path)), raw
