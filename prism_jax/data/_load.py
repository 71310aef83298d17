"""Loading jobs, models and machines by name or path, and saving jobs."""

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from .._files import check_writable, shown
from .._misc import quoted
from ._check import check_job, check_plausible
from ._derived import FOLLOW, put_derived, without_keys
from ._given import Given, dotted_keys
from ._hardware import Cluster, Device, check_cluster, sized
from ._job import Job
from ._kernels import Kernels, apply_calibrated
from ._load_kernels import load_kernels
from ._model import Model, check_model
from ._operators import load_operators
from ._override import Override, apply_kernel_override, apply_override, overrides_of, put_layers
from ._read import find_file, is_path, list_names, located, read_toml, write_toml
from ._reference import given_keys
from ._training import load_software
from ._types import check_keys, convert


_T = TypeVar("_T", bound=msgspec.Struct)

# Names of dtypes in PyTorch.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}


def load_model(name: str | os.PathLike[str]) -> Model:
    """Loads a model by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    model, _ = _load("model", Model, name)
    with located(shown(name)):
        check_model(model)
    return model


def load_device(name: str | os.PathLike[str]) -> Device:
    """Loads a device by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    return _load("device", Device, name)[0]


def load_cluster(name: str | os.PathLike[str], num_nodes: int | None = None) -> Cluster:
    """Loads a cluster and its device by the name of a shipped family, or by the path of a file.

    **Arguments:**

    - `name`: the name of a family, or the path of a file.
    - `num_nodes`: the number of nodes. A family needs it; a file may give it itself.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("cluster", name)
    return _cluster_of(_cluster_table(path), shown(path), num_nodes)


def load_job(
    name_or_path: str | os.PathLike[str], overrides: Iterable[str] | Mapping[str, Any] = ()
) -> Job:
    """Loads a job with its model, cluster, device and kernels.

    **Arguments:**

    - `name_or_path`: the name of a shipped job, or the path of a file of `kind = "job"`.
    - `overrides`: changes to the job, such as `"layout.dp=64"`, `"cluster.num_nodes=600"` or
        `"kernels.all_gather.sigma=0.1"`: each is a dotted key of the complete job and its value in
        TOML, where a bare word is a string. `model`, `cluster` and `cluster.device` also accept
        names, and `layers` the file of an architecture. Or the new value of each key, such as
        `{"layout.dp": 64}`, where `None` takes the key out.

    **Returns:**

    The job.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key, or the override.
    """
    path = find_file("job", name_or_path)
    return make_job(read_toml(path, "job"), path, overrides)


def make_job(
    raw: dict[str, Any],
    path: pathlib.Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> Job:
    """`load_job`, for the table of a file at `path`, which need not exist."""
    parsed = overrides_of(overrides)
    file = shown(path)
    for override in parsed:
        if override.value is not None:
            raw = without_keys(raw, FOLLOW.get(override.key, ()))
    if "kernels" in raw:
        raise ValueError(
            f"{file}: the key `kernels` is for overrides; a file names a profile as `kernels` of "
            "its cluster and device."
        )
    changes = []
    for override in parsed:
        if override.keys in (("model",), ("cluster",)):
            raw[override.key] = override.value
        elif override.keys == ("num_nodes",):
            changes.append(msgspec.structs.replace(override, keys=("cluster", "num_nodes")))
        elif override.keys[0] != "kernels":
            changes.append(override)
    if {override.keys[0] for override in parsed} - {"kernels"}:  # It did not run like this.
        raw.pop("allow_oom", None)
    num_nodes = raw.pop("num_nodes", None)
    check_keys(raw, Job, lambda key: file)
    if num_nodes is not None and "cluster" not in raw:
        raise ValueError(
            f"{file}: `num_nodes` belongs to a cluster, but there is none; add `cluster`, or leave "
            "`num_nodes` out."
        )
    origin = {override.key: override for override in parsed}

    def where(key: str) -> str:
        while key and key not in origin:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return f"override `{origin[key]}`" if key else file

    _resolve(raw, path, changes, num_nodes)
    for override in put_layers(raw, changes):
        with located(f"override `{override}`"):
            origin[apply_override(raw, override)] = override
    given = Given(tuple(sorted(key for key, _ in dotted_keys(raw))))
    _put_stack(raw, path)
    with located(file):
        put_derived(raw)
        if isinstance(raw.get("cluster"), dict):
            raw["cluster"] = sized(raw["cluster"])
    raw.setdefault("name", quoted(path.stem))
    _call_dtypes_by_their_names(raw.get("training"))
    job = msgspec.structs.replace(convert(raw, Job, where), given=given)
    job = _with_kernels(
        job, file, [override for override in parsed if override.keys[0] == "kernels"]
    )
    check_job(job, file)
    return job


def _with_kernels(job: Job, file: str, overrides: Iterable[Override]) -> Job:
    """The job with the kernels of its cluster, and these changes to them."""
    if job.cluster is not None:
        with located(file):
            check_cluster(job.cluster)
            if not job.allow_implausible:
                check_plausible(job.cluster)
        job = msgspec.structs.replace(job, kernels=kernels_of(job, file))
    for override in overrides:
        if job.kernels is None:
            raise ValueError(
                f"override `{override}`: the job `{job.name}` names no cluster, so it has no "
                "kernels."
            )
        changed = apply_kernel_override(job.kernels, override)
        job = msgspec.structs.replace(job, kernels=changed)
    return job


def kernels_of(job: Job, where: str = "") -> Kernels:
    """The kernels of a job's cluster and operators, with the changes of `calibrated`; `where` is
    said in errors.
    """
    assert job.cluster is not None
    operators = job.training and job.training.operators
    with located(where or job.name):
        kernels = load_kernels(job.cluster, load_operators(operators) if operators else None)
    if job.calibrated is None:
        return kernels
    return apply_calibrated(kernels, job.calibrated, f"{where or job.name}, `calibrated`")


def _call_dtypes_by_their_names(training: Any) -> None:
    """Replaces PyTorch's names of dtypes, in place."""
    for key, value in training.items() if isinstance(training, dict) else ():
        if key.endswith("dtype") and isinstance(value, str):
            training[key] = _DTYPES.get(value.removeprefix("torch."), value)


def _resolve(
    raw: dict[str, Any], path: pathlib.Path, changes: list[Override], num_nodes: Any
) -> None:
    """Replaces names of models, clusters and devices by their tables, in place."""
    if isinstance(raw.get("model"), str):
        raw["model"] = _load("model", Model, raw["model"], path)[1]
    if isinstance(raw.get("cluster"), str):
        of_cluster = find_file("cluster", raw["cluster"], path)
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
        cluster["device"] = _load("device", Device, cluster["device"], path)[1]
    device = cluster.get("device")
    if not isinstance(device, dict) or "power" in device:
        return
    for override in changes:
        if override.keys[:3] == ("cluster", "device", "power"):
            devices = (name for name in list_names("device") if load_device(name).power)
            raise ValueError(
                f"override `{override}`: what the device `{quoted(device.get('name', ''))}` draws "
                f"is not known; take {', '.join(devices)}, or add `[power]` to the device's file."
            )


def _put_stack(raw: dict[str, Any], path: pathlib.Path) -> None:
    """Adds what a job's software stack sets and the job does not, where a path of a stack stays
    valid in any folder.
    """
    training = raw.get("training")
    if not isinstance(training, dict) or not isinstance(training.get("software"), str):
        return
    name = training["software"]
    if is_path(name):
        name = os.path.abspath(find_file("software stack", name, path))
    stack = load_software(name, path)
    if training.get("recompute") == "selective" != stack.selective:
        if "recompute_modules" in training:
            raise ValueError(
                f"{shown(path)}: the software stack `{quoted(name)}` recomputes by ops and not the "
                f"modules of `training.recompute_modules`, which are Megatron-LM's; leave these "
                f'out, with `training.recompute = "{stack.selective}"`.'
            )
        training = {**training, "recompute": stack.selective}
    raw["training"] = {**stack.training, **training, "software": name}


def _cluster_table(path: pathlib.Path) -> dict[str, Any]:
    """The table of a cluster, with that of its device."""
    raw = _table("cluster", path)
    if isinstance(raw.get("device"), str):
        raw["device"] = _load("device", Device, raw["device"], path)[1]
    return raw


def _table(kind: str, path: pathlib.Path) -> dict[str, Any]:
    """The table of a file, by default named as the file, where paths of kernels and of a network
    are seen from the folder of the file.
    """
    raw = read_toml(path, kind)
    for key in ("kernels", "network"):
        if isinstance(raw.get(key), str) and is_path(raw[key]):
            raw[key] = os.path.abspath(path.parent / raw[key])
    raw.setdefault("name", quoted(path.stem))
    return raw


def _cluster_of(raw: dict[str, Any], where: str, num_nodes: int | None = None) -> Cluster:
    with located(where):
        raw = sized(raw, num_nodes)
    cluster = convert(raw, Cluster, lambda key: where)
    with located(where):
        check_cluster(cluster)
    return cluster


def _load(
    kind: str, cls: type[_T], name: str | os.PathLike[str], given_by: pathlib.Path | None = None
) -> tuple[_T, dict[str, Any]]:
    """A model or a device, and its table."""
    path = find_file(kind, name, given_by)
    raw = _table(kind, path)
    return convert(raw, cls, lambda key: shown(path)), raw


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


def save_job(job: Job, path: str | os.PathLike[str], *, comments: Mapping[str, str] = {}) -> None:
    """Writes a job to a `.toml` file that `load_job` reads as an equal job. A file that is already
    there is replaced.

    The file has the keys that were given (`job.given`), and those whose value is not what it would
    be without the key: what follows from other keys, that of the software stack, or the default. So
    a value that was changed in Python is written, and everything that was not given still follows
    the stack and the keys that were.

    A shipped model is written by its name, a shipped cluster by its family and number of nodes; the
    keys of other models and clusters are written. Of the kernels, only the changes in `calibrated`
    are written.

    **Arguments:**

    - `job`: the job.
    - `path`: the file.
    - `comments`: comments beside keys, by their dotted names, such as `layout.tp`.

    **Raises:**

    `ValueError` if the path does not end in `.toml`, or if nothing can be written there; and if the
    kernels are changed in another way than by `calibrated`.
    """
    check_job_path(path)
    if job.cluster is not None and job.kernels not in (None, kernels_of(job)):
        raise ValueError(
            f"The kernels of the job `{job.name}` were changed, as `--set kernels.rank.sigma=0` "
            "does, and a job file has no key for that; make the change where the file is used, or "
            "in the tables of the cluster."
        )
    table = _given_table(job, quoted(pathlib.Path(path).stem))
    write_toml(pathlib.Path(path), "job", table, comments)


def _given_table(job: Job, name: str) -> dict[str, Any]:
    """The keys of a job's file, but its `kernels`; `name` is that of the job without the key."""
    table = given_keys(job, name)
    model, cluster = job.model, job.cluster
    if model is not None and model.name in list_names("model") and load_model(model.name) == model:
        table["model"] = model.name
    if cluster is not None:
        name, nodes = cluster.name, cluster.num_nodes
        if name in list_names("cluster") and load_cluster(name, nodes) == cluster:
            of_file = table.get("cluster") or {}
            table |= {"cluster": name, "num_nodes": of_file.get("num_nodes")}
    return table


def replaced(job: Job, values: Mapping[str, Any]) -> Job:
    """`Job.replace`: the job as its file would be read, with these overrides."""
    table = {**_given_table(job, ""), "name": job.name}
    changed = make_job(table, pathlib.Path(quoted(job.name) or "job"), values)
    if job.cluster is None or job.kernels in (None, unchanged := kernels_of(job)):
        return changed
    # They were changed, which the table of a job cannot say.
    kernels = job.kernels
    if changed.cluster is None or kernels_of(changed) != unchanged:
        raise ValueError(
            f"The kernels of the job `{job.name}` were changed, and those of its new cluster, or "
            "with its new calibration, are others; replace these keys first."
        )
    for override in overrides_of(values):
        if override.keys[0] == "kernels":
            kernels = apply_kernel_override(kernels, override)
    return msgspec.structs.replace(changed, kernels=kernels)
