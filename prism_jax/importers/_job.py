"""Imports a job from a configuration of another framework."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from .._files import shown
from .._misc import quoted
from ..data import Job, located, make_job, read_text
from ._adapters import read_adapters
from ._draft import Batch, Draft, Status
from ._hugging_face import read_hugging_face
from ._megatron import megatron_reader, read_megatron
from ._megatron_flags import parse_command, parse_model_config, stack_of
from ._problems import Table


# Configurations are a few kilobytes, with lists of quantised layers some megabytes.
_MOST = 2**26
_CLUSTER = "dgx-h100"


@dataclasses.dataclass(frozen=True)
class Imported:
    """A job from a configuration of another framework.

    **Attributes:**

    - `job`: the job.
    - `notes`: a sentence for each thing that was left out or assumed.
    - `question`: a sentence that asks for the batch, if neither the configuration nor a publication
        says it; the job then has one microbatch in each replica.
    - `framework`: whose configuration it is: `huggingface`, `megatron`, or another name.
    - `status`: `guessed` if the type of the model is not known, so that it was read by the usual
        names of keys.
    """

    job: Job
    notes: tuple[str, ...]
    question: str = ""
    framework: str = ""
    status: Status = "imported"


def import_job(
    path: str | os.PathLike[str],
    num_gpus: int,
    *,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    batch: int | None = None,
    software: str | None = None,
    strict: bool = False,
) -> Imported:
    """Makes a job from a configuration of Hugging Face or from the arguments of Megatron-LM.

    **Arguments:**

    - `path`: a `config.json`, or the folder that it was downloaded to, with adapters if there is an
        `adapter_config.json` beside it; or the arguments of Megatron-LM, in a `.yaml` with
        `MODEL_ARGS` or as a command line in a `.sh` or `.txt` file.
    - `num_gpus`: the number of GPUs of the job. `dp` is this number over the product of the other
        degrees.
    - `cluster`: the name of a shipped family, with as many nodes as needed, or the path of a
        cluster; by default DGX H100.
    - `overrides`: as in `load_job`. `layout.dp` is adjusted to the other degrees, and microbatches
        to these if the batch is given, published, or in the arguments of Megatron-LM.
    - `batch`: the number of sequences in a step; by default that of Megatron-LM's arguments, or
        the published one of a model of Hugging Face.
    - `software`: the software stack, by its name or the path of a file, that sets what the file
        does not say; by default that of the framework and the time of the file. A configuration of
        Hugging Face says neither, so a job of it has no stack.
    - `strict`: whether flags and keys that are not known are refused; by default there is a
        note for each.

    **Raises:**

    `ValueError` of one sentence if the file cannot be read, or with everything in it that a job
    cannot express.
    """
    where, path = shown(path), pathlib.Path(path)
    name = path.stem
    if path.is_dir():  # As it was downloaded.
        name, path = path.resolve().name, path / "config.json"
        if not path.exists():
            raise ValueError(f"{where}: this folder has no `config.json`; give one that has.")
    draft = _read(path, where, num_gpus, strict)
    raw, notes, known = dict(draft.tables), list(draft.notes), draft.batch
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    raw |= {"cluster": cluster or _CLUSTER, "world_size": num_gpus}
    del raw["layout"]["dp"]  # It follows, as do nodes and, of a known batch, microbatches.
    raw["model"]["source"] = raw["source"] = f"imported from {path.name}"
    raw["name"] = raw["model"]["name"] = quoted(name)
    keys = {text.replace(" ", "").partition("=")[0] for text in overrides}
    if software is not None and "training.software" in keys:
        both = "`--software` and `training.software`"
        raise ValueError(f"{where}: {both} say the same; give one of them.")
    says_stack = software is None and "training.software" not in keys
    if says_stack:
        software = draft.software
    if software is not None:
        raw["training"]["software"] = software
    asked = ""
    if "schedule.num_microbatches" in keys:
        if batch is not None:
            both = "`--batch` and `schedule.num_microbatches`"
            raise ValueError(f"{where}: {both} say the same; give one of them.")
        known = None
    elif batch is not None:
        known = Batch(batch)
    elif known is None:
        asked = draft.question
    if known is not None:
        if known.length is not None:
            raw["training"]["sequence_length"] = known.length
        asked = _set_batch(raw, known, path, overrides)
        if asked and not known.source:
            raise ValueError(f"{where}: {asked}.")
        if known.source and not asked:
            notes.append(
                f"The batch is the published one, {known.sequences:,} sequences (of "
                f"{known.length:,} tokens each; {known.source}); `--batch` gives another."
            )
    if says_stack:
        notes.append(draft.why_software)
    usual = {"cluster": None if cluster else _CLUSTER, "layout.tp": 1, "layout.pp": 1}
    of_file = {f"layout.{degree}" for degree in raw["layout"]}
    said = [f"`{key}={usual[key]}`" for key in usual if usual[key] and key not in keys | of_file]
    if said:
        assumed = f"Assumed, as neither the file nor an option says it: {', '.join(said)}"
        notes.append(f"{assumed}; `--cluster` and `--set` give others.")
    job = make_job(raw, path, overrides)
    question = f"{where}: {asked}." if asked else ""
    return Imported(job, tuple(dict.fromkeys(notes)), question, draft.framework, draft.status)


def _set_batch(raw: Table, batch: Batch, path: pathlib.Path, overrides: tuple[str, ...]) -> str:
    """Sets the batch of a job's tables, or says why it cannot be."""
    alone = make_job(dict(raw), path, overrides)
    assert alone.training is not None
    dp, size = alone.layout.dp, alone.training.microbatch_size
    if batch.sequences % (dp * size):
        return (
            f"a {'published ' * bool(batch.source)}batch of {batch.sequences:,} sequences is not a "
            f"multiple of dp*microbatch_size = {dp}*{size}; give one with `--batch`"
        )
    del raw["schedule"]["num_microbatches"]
    raw["training"]["global_batch_size"] = batch.sequences
    return ""


def _read(path: pathlib.Path, where: str, num_gpus: int, strict: bool) -> Draft:
    """What a file says of a job."""
    if path.suffix.lower() not in _KINDS:
        raise ValueError(
            f"{where}: give a `.json` of Hugging Face, or the arguments of Megatron-LM as `.yaml`, "
            "`.sh` or `.txt`."
        )
    parse, read = _KINDS[path.suffix.lower()]
    with located(where):
        table = _parsed(parse, path)
        draft = read(table, num_gpus, strict)
    beside = path.with_name("adapter_config.json")
    if path.name == "config.json" and beside.exists():
        with located(shown(beside)):
            adapters, notes = read_adapters(_parsed(json.loads, beside))
        draft.tables["training"]["adapters"] = adapters
        draft.notes.extend(notes)
    return draft


def _parsed(parse: Callable[[str], Any], path: pathlib.Path) -> Table:
    """The table of keys in a file."""
    text = read_text(path, _MOST)
    try:
        table = parse(text)
    except (ValueError, RecursionError) as error:
        problem = quoted(" ".join(str(error).split()).rstrip("."), 160)
        if isinstance(error, json.JSONDecodeError) and not text.rstrip().endswith(("}", "]")):
            problem = "the JSON ends early, as of a download that was cut"
        raise ValueError(f"it cannot be read: {problem}; give another file.") from None
    if not isinstance(table, dict):
        raise ValueError("this is not a table of keys; give a model's configuration.")
    return table


def _hugging_face(table: Any, num_gpus: int, strict: bool) -> Draft:
    return read_hugging_face(table, num_gpus, strict=strict)


def _megatron(table: Any, num_gpus: int, strict: bool) -> Draft:
    read = megatron_reader(table, strict=strict)
    tables = read_megatron(read, num_gpus)
    batch = None
    if "global-batch-size" in read:
        batch = Batch(read.count("global-batch-size"))
    software, why = stack_of(read)
    return Draft(tables, read.notes, "megatron", batch=batch, software=software, why_software=why)


# What reads the text of a file, and what makes a draft of it, by the suffix of its name.
_KINDS: dict[str, tuple[Callable[[str], Any], Callable[[Any, int, bool], Draft]]] = {
    ".json": (json.loads, _hugging_face),
    ".yaml": (parse_model_config, _megatron),
    ".yml": (parse_model_config, _megatron),
    ".sh": (parse_command, _megatron),
    ".txt": (parse_command, _megatron),
}
