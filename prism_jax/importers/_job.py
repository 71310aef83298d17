"""Imports a job from configurations of other frameworks."""

import contextlib
import dataclasses
import itertools as it
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping

from .._files import shown
from .._misc import quoted
from ..data import Job, located, make_job, read_text
from ._adapters import read_adapters
from ._documents import Document, document
from ._draft import BatchSizes, Draft, Status
from ._frameworks import framework_of
from ._hugging_face import read_hugging_face
from ._problems import NotImportableError, Table
from ._training_files import GpusNotSaidError, read_training, wanted, without_left_out


# Configurations of models list their layers, so that some have megabytes.
_MOST = 2**26
_ADAPTERS = "adapter_config.json"
# Without one, and where the dtype is of newer devices.
_CLUSTER, _NARROW_CLUSTER = "dgx-h100", "hgx-b200"


@dataclasses.dataclass(frozen=True)
class Imported:
    """A job from configurations of other frameworks.

    **Attributes:**

    - `job`: the job.
    - `notes`: a sentence for each thing that was left out or assumed.
    - `question`: a sentence that asks for the batch, if neither the configuration nor a publication
        says it; the job then has one microbatch in each replica.
    - `kind`: whose configuration it is: `huggingface`, `megatron`, or another framework's name.
    - `status`: `guessed` if the type of the model is not known, so that it was read by the usual
        names of keys.
    - `comments`: by dotted keys of the job, where each is from.
    """

    job: Job
    notes: tuple[str, ...]
    question: str = ""
    kind: str = ""
    status: Status = "imported"
    comments: Mapping[str, str] = dataclasses.field(default_factory=dict)


def import_job(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    num_gpus: int | None = None,
    *,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    batch: int | None = None,
    software: str | None = None,
    strict: bool = False,
    variables: Iterable[str] = (),
    leave_out: Iterable[str] = (),
) -> Imported:
    """Makes a job from configurations of other frameworks: from a `config.json` of Hugging Face,
    from training files, or from both. What a file is follows from its content.

    **Arguments:**

    - `paths`: one file or several: a `config.json`, or the folder that it was downloaded to, with
        adapters if there is an `adapter_config.json` beside it; a launch script or the arguments
        that a program printed; a YAML, TOML or JSON file of a framework.
    - `num_gpus`: the number of GPUs of the job; by default that of the launcher in the files. `dp`
        is this number over the product of the other degrees.
    - `cluster`: the name of a shipped family, with as many nodes as needed, or the path of a
        cluster; by default DGX H100.
    - `overrides`: as in `load_job`. `layout.dp` is adjusted to the other degrees, and microbatches
        to these if the batch is given, published, or in the files.
    - `batch`: the number of sequences in a step; by default that of the files, or the published one
        of a model of Hugging Face.
    - `software`: the software stack, by its name or the path of a file, that sets what the files
        do not say; by default that of the framework and the time of the files. A `config.json`
        says neither, so a job of it alone has no stack.
    - `strict`: whether keys that are not known are refused; by default there is a note for each.
    - `variables`: values of variables of scripts, as `NAME=VALUE`, that the scripts do not assign.
        Those that neither have are looked up in the environment.
    - `leave_out`: keys of files that are left out, whatever they cost.

    **Raises:**

    `ValueError` of one sentence if a file cannot be read; `NotImportableError`, which is one, with
    everything in the files that a job cannot express, by its cost.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else [*paths]
    if not files:
        raise ValueError("There is no file to import; give one.")
    path = pathlib.Path(files[0])
    stem = path.resolve().name if path.is_dir() else path.stem
    where = ", ".join(shown(file) for file in files)
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    documents, idle = _documents(files, variables)
    pairs = (text.replace(" ", "").partition("=") for text in overrides)
    keys = {key: value for key, _, value in pairs}
    draft, num_gpus = _draft(documents, num_gpus, where, strict, leave_out, keys)
    raw, notes, comments = dict(draft.tables), [*draft.notes, *idle], dict(draft.comments)
    if cluster is None and raw["training"].get("dtype") in ("mxfp8", "fp4"):
        cluster = _NARROW_CLUSTER
        notes.append(
            f"A DGX H100 has no {raw['training']['dtype']}, so the cluster is `{cluster}`; "
            "`--cluster` gives another."
        )
    raw |= {"cluster": cluster or _CLUSTER, "world_size": num_gpus}
    del raw["layout"]["dp"]  # It follows, as do nodes and, of a known batch, microbatches.
    names = " and ".join(document.name for document in documents)
    raw["model"]["source"] = raw["source"] = f"imported from {names}"
    raw["name"] = raw["model"]["name"] = quoted(stem)
    for option, value, key in (
        ("software", software, "training.software"),
        ("batch", batch, "schedule.num_microbatches"),
    ):
        if value is not None and key in keys:
            raise ValueError(f"{where}: `--{option}` and `{key}` say the same; give one of them.")
    says_stack = software is None and "training.software" not in keys
    if says_stack:
        software = draft.software
    if software is not None:
        raw["training"]["software"] = software
    question, of_step = draft.question, draft.batch if batch is None else BatchSizes(batch)
    if "schedule.num_microbatches" in keys:
        question = ""
    elif of_step is not None:
        question = _set_batch(raw, of_step, notes, path, overrides)
        if question and not of_step.source:
            raise ValueError(f"{where}: {question}.")
        if comment := comments.pop("schedule.num_microbatches", ""):
            comments["training.global_batch_size"] = comment
    if says_stack:
        notes.append(draft.why_software)
    said = {*keys, *(f"layout.{degree}" for degree in raw["layout"]), *["cluster"] * bool(cluster)}
    notes += _assumed(said)
    job = make_job(raw, path, overrides)
    question = question and f"{where}: {question}."
    comments = {key: text for key, text in comments.items() if key not in keys}
    notes = [*dict.fromkeys(notes)]
    return Imported(job, tuple(notes), question, draft.framework, draft.status, comments)


def _assumed(said: Collection[str]) -> list[str]:
    """A note of what no file and no option says, which is among `said` otherwise."""
    usual = {"cluster": _CLUSTER, "layout.tp": 1, "layout.pp": 1}
    assumed = [f"`{key}={value}`" for key, value in usual.items() if key not in said]
    if not assumed:
        return []
    note = f"Assumed, as neither a file nor an option says it: {', '.join(assumed)}"
    return [f"{note}; `--cluster` and `--set` give others."]


def _documents(
    files: Iterable[str | os.PathLike[str]], variables: Iterable[str]
) -> tuple[list[Document], list[str]]:
    """What each file says, and a note for each variable that a file assigns itself."""
    values: dict[str, str] = {}
    for text in (variables,) if isinstance(variables, str) else variables:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"`--var {quoted(text)}` must be `NAME=VALUE`, such as `TP=8`.")
        values[name.strip().lstrip("$")] = value
    paths = [pathlib.Path(file) for file in files]
    for i, path in enumerate(paths):
        if path.is_dir():  # As it was downloaded.
            paths[i] = path / "config.json"
            if not paths[i].exists():
                raise ValueError(
                    f"{shown(path)}: this folder has no `config.json`; give one that has."
                )
    beside = [path.with_name(_ADAPTERS) for path in paths if path.name == "config.json"]
    paths += [path for path in beside if path.exists() and path not in paths]
    documents: list[Document] = []
    for path in paths:
        text = read_text(path, _MOST)
        with located(shown(path)):
            file = document(path.name, text, (values, os.environ), _beside(path, paths))
            if file.table.get("kind") == "job":
                raise ValueError("this is a job already; `prism-jax predict` reads it.")
            documents.append(file._replace(where=shown(path)))
    idle = (
        name
        for name, value in values.items()
        for document in documents
        if document.assigned.get(name, [value]) != [value]
    )
    said = "changes nothing, because the script assigns it itself."
    return documents, [f"`--var {name}` {said}" for name in idle]


def _beside(path: pathlib.Path, paths: list[pathlib.Path]):
    """Reads a script that another reads: one of those that are given, or one in its folder."""

    def source(name: str) -> str | None:
        plain = pathlib.PurePath(name).name
        for file in (*paths, path.with_name(plain) if plain else path):
            if file.name == plain and file.suffix in (".sh", ".env", "") and file.is_file():
                with contextlib.suppress(ValueError):
                    return read_text(file, 2**20)
        return None

    return source


def _is_config(document: Document) -> bool:
    """Whether a file is a model's `config.json`, and not one of training."""
    if document.kind == "command" or document.kind == "arguments":
        return False
    table = document.table
    if "model_type" in table and "base_model" not in table:
        return True
    if "architectures" in table or isinstance(table.get("text_config"), dict):
        return True
    framework = framework_of(document)
    trains = any("batch" in key or "parallel" in key for key in document.keys)
    return document.kind == "json" and (
        framework is None or (framework.name == "megatron" and not trains)
    )


def _draft(
    documents: list[Document],
    num_gpus: int | None,
    where: str,
    strict: bool,
    leave_out: Iterable[str],
    replaced: Mapping[str, str],
) -> tuple[Draft, int]:
    """What files say of a job, and its number of GPUs."""
    adapters = [file for file in documents if "peft_type" in file.table or file.name == _ADAPTERS]
    configs = [file for file in documents if file not in adapters and _is_config(file)]
    training = [file for file in documents if file not in [*configs, *adapters]]
    try:
        if len(configs) > 1:
            names = " and ".join(config.name for config in configs)
            raise ValueError(f"{names} are two models; give one of them.")
        if training:
            config = configs[0] if configs else None
            draft, gpus = read_training(training, config, num_gpus, strict, leave_out, replaced)
        elif not configs:
            raise ValueError("adapters are no model; give its `config.json`, too.")
        elif num_gpus is None:
            raise GpusNotSaidError(1, "huggingface")
        else:
            table, gpus = without_left_out(configs[0].table, leave_out), num_gpus
            draft = read_hugging_face(table, num_gpus, strict=strict)
        for file in adapters:
            where = file.where
            draft.tables["training"]["adapters"], notes = read_adapters(file.table)
            draft.notes.extend(notes)
    except NotImportableError as error:
        error.where, error.kind = where, error.kind or "huggingface"
        if not isinstance(error, GpusNotSaidError):
            error.reasons += tuple(it.chain.from_iterable(map(wanted, training)))
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return draft, gpus


def _set_batch(
    raw: Table, batch: BatchSizes, notes: list[str], path: pathlib.Path, overrides: tuple[str, ...]
) -> str:
    """Sets the batch of a job's tables, with a note if it is the published one; or says why it
    cannot be.
    """
    if batch.length is not None:
        raw["training"]["sequence_length"] = batch.length
    alone = make_job(dict(raw), path, overrides)
    assert alone.training is not None
    dp, size = alone.layout.dp, alone.training.microbatch_size
    if batch.sequences % (dp * size):
        return (
            f"a {'published ' * bool(batch.source)}batch of {batch.sequences:,} sequences is not a "
            f"multiple of dp*microbatch_size = {dp}*{size}; give one with `--batch`"
        )
    raw["schedule"].pop("num_microbatches", None)
    raw["training"]["global_batch_size"] = batch.sequences
    if batch.source:
        notes.append(
            f"The batch is the published one, {batch.sequences:,} sequences (of {batch.length:,} "
            f"tokens each; {batch.source}); `--batch` gives another."
        )
    return ""
