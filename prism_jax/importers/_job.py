"""Imports a job from a configuration of another framework."""

import dataclasses
import functools as ft
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._files import shown
from .._misc import quoted
from ..data import Job, Layout, list_clusters, load_cluster, make_job, read_text
from ._batches import published_batch
from ._hugging_face import hugging_face_reader, read_hugging_face
from ._megatron import megatron_reader, read_megatron
from ._problems import Reader, Table


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


# Blanks, ends of lines, words with their quoted parts, and what is none of these: a quotation mark
# or a backslash at the end. Nothing is tried twice, so that a word may be as long as a file.
_TOKEN = re.compile(
    r"""([^\S\n]+)|(\n+)|((?:[^\s"'\\]++|"(?:[^"\\]++|\\.)*+"|'[^']*+'|\\.)++)|(.)""", re.DOTALL
)
_PART = re.compile(r"""'([^']*+)'|"((?:[^"\\]++|\\.)*+)"|\\(.)""", re.DOTALL)


def _words(text: str) -> Iterator[str]:
    """The words of a command as a shell reads them, and the ends of its lines."""
    for match in _TOKEN.finditer(text):
        _, line, word, rest = match.groups()
        if rest:
            raise ValueError(f"a `{rest}` is not closed")
        if line:
            yield line
        elif word:
            yield _PART.sub(_unquoted, word)


def _unquoted(part: re.Match[str]) -> str:
    single, double, escaped = part.groups()
    if double is not None:
        return re.sub(r'\\(["\\$`])', r"\1", double)
    return escaped if single is None else single


def _flags(text: str) -> dict[str, object]:
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    found: dict[str, object] = {}
    flag, values = "", []
    for word in (*_words(text), "--"):
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
    """The flags under `MODEL_ARGS`, or of the whole YAML file if it has no such section, as texts,
    truth values or `None`. Anything nested is not a flag.

    **Raises:**

    A `ValueError` of one clause that names the line.
    """
    import yaml

    loader = _loader()
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            raise ValueError("it has aliases (`*name`), and only plain values are read")
        found = yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line} is not YAML ({quoted(error.problem or '')})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is not YAML ({quoted(str(error))})") from None
    flags = found.get("MODEL_ARGS", found) if isinstance(found, dict) else found
    if not isinstance(flags, dict) or not flags:
        raise ValueError("it has no flags with values, as in `--num-layers: 32`")
    return {
        str(flag).lstrip("-"): _plain(value)
        for flag, value in flags.items()
        if not isinstance(value, dict)
    }


def _plain(value: Any) -> Any:
    """A value as a command line would have it."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return value.strip() if isinstance(value, str) else value


@ft.cache
def _loader() -> Any:
    """Reads all values but truth values and nothing as texts: YAML 1.1 takes `1e-5` for a text, and
    `no` for a truth value.
    """
    import yaml

    class Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):
        pass

    values = {"true": True, "false": False, "null": None, "~": None, "": None}
    tag = "tag:yaml.org,2002:null"
    Loader.add_implicit_resolver(tag, re.compile(r"(?i)(true|false|null|~|)$"), None)
    Loader.add_constructor(tag, lambda loader, node: values[node.value.lower()])
    return Loader


# Configurations are a few kilobytes.
_MOST = 2**20
_CLUSTER = "dgx-h100"
_Megatron = (megatron_reader, read_megatron)
_KINDS: dict[str, tuple[Callable[[str], Any], Callable[..., Reader], Callable[..., Table]]] = {
    ".json": (json.loads, hugging_face_reader, read_hugging_face),
    ".yaml": (parse_model_config, *_Megatron),
    ".yml": (parse_model_config, *_Megatron),
    ".sh": (parse_command, *_Megatron),
    ".txt": (parse_command, *_Megatron),
}


@dataclasses.dataclass(frozen=True)
class Imported:
    """A job from a configuration of another framework.

    **Attributes:**

    - `job`: the job.
    - `notes`: a sentence for each thing that was left out or assumed.
    - `question`: a sentence that asks for the batch, if neither the configuration nor a publication
        says it; the job then has one microbatch in each replica.
    """

    job: Job
    notes: tuple[str, ...]
    question: str = ""


def import_job(
    path: str | os.PathLike[str],
    num_gpus: int,
    *,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    batch: int | None = None,
    strict: bool = False,
) -> Job:
    """As `import_with_notes`, but only the job."""
    found = import_with_notes(
        path, num_gpus, cluster=cluster, overrides=overrides, batch=batch, strict=strict
    )
    return found.job


def import_with_notes(
    path: str | os.PathLike[str],
    num_gpus: int,
    *,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    batch: int | None = None,
    strict: bool = False,
) -> Imported:
    """Makes a job from a configuration of Hugging Face or from the arguments of Megatron-LM.

    **Arguments:**

    - `path`: a `config.json`; or the arguments of Megatron-LM, in a `.yaml` with `MODEL_ARGS` or as
        a command line in a `.sh` or `.txt` file.
    - `num_gpus`: the number of GPUs of the job. `dp` is this number over the product of the other
        degrees.
    - `cluster`: the name of a shipped family, with as many nodes as needed, or the path of a
        cluster; by default DGX H100.
    - `overrides`: as in `load_job`. `layout.dp` is adjusted to the other degrees; microbatches are
        not, unless the batch is given or published.
    - `batch`: the number of sequences in a step; by default that of Megatron-LM's arguments, or
        the published one of a model of Hugging Face.
    - `strict`: whether flags of Megatron-LM that are not known are refused; by default there is a
        note for each.

    **Raises:**

    `ValueError` of one sentence if the file cannot be read, or with everything in it that a job
    cannot express.
    """
    where, path = shown(path), pathlib.Path(path)
    suffix = path.suffix.lower()
    if suffix not in _KINDS:
        raise ValueError(
            f"{where}: give a `.json` of Hugging Face, or the arguments of Megatron-LM as `.yaml`, "
            "`.sh` or `.txt`."
        )
    parse, reader, convert = _KINDS[suffix]
    text = read_text(path, _MOST)
    try:
        table = parse(text)
    except (ValueError, RecursionError) as error:
        problem = quoted(" ".join(str(error).split()).rstrip("."), 160)
        raise ValueError(f"{where}: it cannot be read: {problem}; give another file.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{where}: this is not a table of keys; give a model's configuration.")
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    read = reader(table, strict=strict)
    raw = convert(read, num_gpus, where)
    raw["cluster"] = cluster or _CLUSTER
    if raw["cluster"] in list_clusters():
        raw["num_nodes"] = -(-num_gpus // load_cluster(raw["cluster"], 1).devices_per_node)
    raw["model"]["source"] = raw["source"] = f"imported from {path.name}"
    raw["name"] = quoted(path.stem)
    keys = {text.replace(" ", "").partition("=")[0] for text in overrides}
    published, asked = None, ""
    if batch is not None and "schedule.num_microbatches" in keys:
        raise ValueError(
            f"{where}: `--batch` and `schedule.num_microbatches` say the same; give one of them."
        )
    if batch is None and suffix == ".json" and "schedule.num_microbatches" not in keys:
        published = published_batch(read.text("model_type"), raw["model"])
        asked = "the batch is not known; give the sequences of a step with `--batch`"
    if published is not None:
        raw["training"]["sequence_length"], asked = published.length, ""
    sequences = batch or (published.sequences if published else 0)
    if sequences:
        # Whatever must divide the microbatches of a replica divides this too.
        raw["schedule"]["num_microbatches"] = sequences
    alone = make_job(raw | {"layout": raw["layout"] | {"dp": 1}}, path, overrides)
    dp = alone.layout.dp if "layout.dp" in keys else _replicas(alone.layout, num_gpus, where)
    overrides = (*overrides, f"layout.dp={dp}")
    if sequences:
        assert alone.training is not None
        number, odd = divmod(sequences, dp * alone.training.microbatch_size)
        if odd:
            asked = (
                f"a {'published ' * (batch is None)}batch of {sequences:,} sequences is not a "
                f"multiple of dp*microbatch_size = {dp}*{alone.training.microbatch_size}; give one "
                "with `--batch`"
            )
        if odd and batch:
            raise ValueError(f"{where}: {asked}.")
        overrides = (*overrides, f"schedule.num_microbatches={1 if odd else number}")
    if published is not None and not asked:
        read.notes.append(
            f"The batch is the published one, {sequences:,} sequences (of "
            f"{published.length:,} tokens each; {published.source}); `--batch` gives another."
        )
    job = make_job(raw, path, overrides)
    if job.layout.world_size != num_gpus:
        raise ValueError(
            f"{where}: `layout.dp` = {job.layout.dp} makes {job.layout.world_size} GPUs, not "
            f"{num_gpus}; leave it out, and it follows."
        )
    return Imported(job, tuple(dict.fromkeys(read.notes)), f"{where}: {asked}." if asked else "")


def _replicas(layout: Layout, num_gpus: int, where: str) -> int:
    """How many replicas use all GPUs.

    **Arguments:**

    - `layout`: that of one replica.
    """
    if num_gpus % layout.world_size != 0:
        raise ValueError(
            f"{where}: tp*pp*cp = {layout.tp}*{layout.pp}*{layout.cp} does not divide "
            f"{num_gpus} GPUs; use a divisor."
        )
    return num_gpus // layout.world_size
