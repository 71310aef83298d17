"""Imports a job from a configuration of another framework."""

import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from .._files import shown
from .._misc import quoted
from ..data import Job, list_clusters, load_cluster, make_job, read_text
from ._hugging_face import from_hugging_face
from ._megatron import from_megatron


def parse_command(text: str) -> dict[str, object]:
    """The flags of a command line, each with its words, or `True` if it has none.

    The value of a flag ends at the end of the line, unless this is a backslash. Lists of flags
    (`ARGS=(...)`) and strings of flags (`ARGS="..."`) count as used.

    **Raises:**

    A `ValueError` of one clause if it cannot be split.
    """
    found = _flags(text)
    if not found:
        raise ValueError("it has no flags such as `--num-layers 32`")
    return found


def _flags(text: str) -> dict[str, object]:
    text = re.sub(r"\\\r?\n", " ", text)
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", "", text), posix=True, punctuation_chars="\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: dict[str, object] = {}
    flag, values = "", []
    for word in [*lexer, "--"]:
        named = re.match(r"\w+\+?=(\(?)\s*(?=--)", word)
        word = word[named.end() :] if named else word
        if named and not named[1]:
            found |= _flags(word)
            continue
        # So does the end of a list.
        ends = word.isspace() or word.count(")") > word.count("(")
        word = word.rstrip(")\n") if ends else word
        if word.startswith("--"):
            if flag:
                found[flag] = " ".join(values) if values else True
            flag, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
        elif word:
            values.append(word)
        if ends and flag:
            found[flag] = " ".join(values) if values else True
            flag, values = "", []
    return found


def parse_model_config(text: str) -> dict[str, object]:
    """The flags under `MODEL_ARGS`, or of the whole file if it has no such section.

    These files are simple: one flag per line, `--num-layers: 32`. Anything nested is not a flag.

    **Raises:**

    A `ValueError` of one clause that names the line.
    """
    found: dict[str, object] = {}
    section, has_section = "", re.search(r"(?m)^MODEL_ARGS:\s*$", text) is not None
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not bare or bare == "---":
            continue
        match = re.fullmatch(r"(\s*)(-{0,2}[A-Za-z][\w.-]*):(?:\s+(.*))?", bare)
        if has_section and not bare.startswith(" "):
            section = match[2] if match else ""
            continue
        if has_section and section != "MODEL_ARGS":
            continue
        if not match:
            raise ValueError(f"line {number} is no flag with its value, as in `--num-layers: 32`")
        value = (match[3] or "").strip()
        quoted = re.fullmatch(r"([\"'])(.*)\1", value)
        value = quoted[2] if quoted else value
        if quoted or value.lower() not in ("true", "false", "null", "~"):
            found[match[2].lstrip("-")] = value
        else:
            found[match[2].lstrip("-")] = {"true": True, "false": False}.get(value.lower())
    if not found:
        raise ValueError("it has no flags under `MODEL_ARGS`")
    return found


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
