"""Imports a job from a configuration of another framework."""

import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from .._files import shown
from .._misc import quoted
from ..data import Job, list_clusters, load_cluster, make_job, read_text
from ._hugging_face import from_hugging_face
from ._megatron import from_megatron
from ._read_megatron import parse_command, parse_model_config


# Configurations are a few kilobytes.
_MOST = 2**20
_CLUSTER = "dgx-h100"
_Parse = Callable[[str], dict[str, Any]]
_KINDS: dict[str, tuple[_Parse, Callable[[dict[str, Any], int, str], dict[str, Any]]]] = {
    ".json": (json.loads, from_hugging_face),
    ".yaml": (parse_model_config, from_megatron),
    ".yml": (parse_model_config, from_megatron),
    ".sh": (parse_command, from_megatron),
    ".txt": (parse_command, from_megatron),
}


def import_job(
    path: str | os.PathLike[str],
    num_gpus: int,
    *,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
) -> Job:
    """Makes a job from a configuration of Hugging Face or from the arguments of Megatron-LM.

    **Arguments:**

    - `path`: a `config.json`; or the arguments of Megatron-LM, in a `.yaml` with `MODEL_ARGS` or as
        a command line in a `.sh` or `.txt` file.
    - `num_gpus`: the number of GPUs of the job. `dp` is this number over the product of the other
        degrees.
    - `cluster`: the name of a shipped family, with as many nodes as needed, or the path of a
        cluster; by default DGX H100.
    - `overrides`: as in `load_job`. `layout.dp` is adjusted to the other degrees; microbatches are
        not.

    **Returns:**

    The job.

    **Raises:**

    `ValueError` of one sentence if the file cannot be read, or with everything in it that a job
    cannot express.
    """
    where = shown(path)
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in _KINDS:
        raise ValueError(
            f"{where}: give a `.json` of Hugging Face, or the arguments of Megatron-LM as `.yaml`, "
            "`.sh` or `.txt`."
        )
    parse, convert = _KINDS[suffix]
    text = read_text(path, _MOST)
    try:
        table = parse(text)
    except (ValueError, RecursionError) as error:
        problem = quoted(" ".join(str(error).split()).rstrip("."), 160)
        raise ValueError(f"{where}: it cannot be read: {problem}; give another file.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{where}: this is not a table of keys; give a model's configuration.")
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    raw = convert(table, num_gpus, where)
    raw["cluster"] = cluster or _CLUSTER
    if raw["cluster"] in list_clusters():
        raw["num_nodes"] = -(-num_gpus // load_cluster(raw["cluster"], 1).devices_per_node)
    raw["model"]["source"] = raw["source"] = f"imported from {pathlib.Path(path).name}"
    raw["name"] = quoted(pathlib.Path(path).stem)
    if not any(text.replace(" ", "").startswith("layout.dp=") for text in overrides):
        overrides = (*overrides, *_replicas(raw, num_gpus, overrides, pathlib.Path(path)))
    job = make_job(raw, pathlib.Path(path), overrides)
    if job.layout.world_size != num_gpus:
        raise ValueError(
            f"{where}: `layout.dp` = {job.layout.dp} makes {job.layout.world_size} GPUs, not "
            f"{num_gpus}; leave it out, and it follows."
        )
    return job


def _replicas(
    raw: dict[str, Any], num_gpus: int, overrides: tuple[str, ...], path: pathlib.Path
) -> tuple[str, ...]:
    """The override that uses the remaining GPUs as replicas."""
    layout = make_job(raw | {"layout": raw["layout"] | {"dp": 1}}, path, overrides).layout
    if num_gpus % layout.world_size != 0:
        raise ValueError(
            f"{shown(path)}: tp*pp*cp = {layout.tp}*{layout.pp}*{layout.cp} does not divide "
            f"{num_gpus} GPUs; use a divisor."
        )
    return (f"layout.dp={num_gpus // layout.world_size}",)
