"""Makes a draft of a job from training files of any framework, and the model's file beside them."""

import functools as ft
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._misc import quoted
from ._documents import Document
from ._draft import BatchSizes, Draft, Status
from ._frameworks import Arguments, Framework, compute, framework, framework_of, translate, usual
from ._hugging_face import read_hugging_face
from ._megatron import DEGREES, USUAL_NODE, gpus_of, least_gpus, read_megatron, uses_experts
from ._megatron_model import model_of
from ._problems import NotImportableError, Reader, Table
from ._shell_words import missing


class GpusNotSaidError(NotImportableError):
    """Files that do not say the number of GPUs.

    **Attributes:**

    - `multiple`: the number of GPUs of which that of the job is a multiple.
    """

    def __init__(self, multiple: int, kind: str, variables: Iterable[str] = ()) -> None:
        self.multiple = multiple
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        give = "".join(f", or `--var {quoted(name)}=...`" for name in dict.fromkeys(variables))
        super().__init__([f"no file says the number of GPUs: give `--gpus`{of}{give}"], kind)


def read_training(
    documents: Sequence[Document],
    config: Document | None,
    num_gpus: int | None,
    strict: bool = False,
    leave_out: Iterable[str] = (),
    replaced: Mapping[str, str] = {},
) -> tuple[Draft, int]:
    """What training files say of a job, and its number of GPUs.

    **Arguments:**

    - `documents`: the files.
    - `config`: the `config.json` of the model, if there is one.
    - `num_gpus`: the number of GPUs; by default that of the launcher.
    - `strict`, `leave_out`: as in `import_job`.
    - `replaced`: the keys of the job that are given beside the files, with their values.

    **Raises:**

    `NotImportableError` with everything that a job cannot express.
    """
    pairs = [(document, owner) for document in documents if (owner := framework_of(document))]
    if not pairs:
        raise ValueError("no file has keys of a framework that is known here; give another file.")
    # A command's options replace those of the files that it names.
    pairs.sort(key=lambda pair: pair[0].kind == "command")
    main = max(pairs, key=lambda pair: len(pair[0].keys))[1]
    arguments = translate(pairs, leave_out, strict)
    arguments.problems.kind = main.name
    _put_launchers(arguments, documents)
    compute(arguments, main)
    for degree in DEGREES.values():
        if str(arguments.flags.get(degree)) == "0":  # As one, in GPT-NeoX.
            del arguments.flags[degree]
    if not main.is_megatron and "micro-batch-size" in arguments.flags:
        arguments.flags.setdefault("num-microbatches", 1)  # None of them accumulates by default.
    read = arguments.reader(strict, replaced)
    model, comment, status = _model(arguments, read, config, main)
    gpus = num_gpus or gpus_of(read)
    least = least_gpus(read, uses_experts(model)) if read.sound(*DEGREES.values()) else 1
    if not gpus:
        read.problems.check()
        sizes = [
            str(arguments.flags.get(flag)) for flag in ("nnodes", "nproc-per-node", "world-size")
        ]
        raise GpusNotSaidError(least, main.name, missing(" ".join(sizes)))
    if num_gpus is None and gpus % least:
        multiple = -(-gpus // least) * least
        read.notes.append(
            f"The launcher has {gpus} GPUs, of which the degrees make no replica, so the job has "
            f"{multiple}; `--gpus` gives another number."
        )
        gpus = multiple
    if arguments.flags.get("shards-in-a-node") and gpus % USUAL_NODE == 0:
        arguments.flags["training.optimizer_instances"] = gpus // USUAL_NODE
        arguments.origins["training.optimizer_instances"] = arguments.origins["training.zero"]
    job = read_megatron(read, gpus, model)
    comments = _keep_given(job, arguments, main)
    _put_keys(job, arguments, comments)
    for key in [*job["model"]] if comment else ():
        comments[f"model.{key}"] = comment
    for document in documents:
        read.notes.extend(f"{clause}, if it says more." for clause in wanted(document))
    names = [key for document, _ in pairs for key in document.keys]
    software, why = _stack(main, names)
    batch = job["schedule"].get("num_microbatches", 1) * job["layout"]["dp"]
    is_said = "global-batch-size" in read or "num-microbatches" in read
    of_step = BatchSizes(batch * job["training"]["microbatch_size"]) if is_said else None
    question = "" if main.is_megatron else _ASK
    of_files = question, status, software, why, comments
    return Draft(job, read.notes, main.name, of_step, *of_files), gpus


_ASK = "the batch is not known; give the sequences of a step with `--batch`"


# What launchers call the ranks of a node, the nodes, and all ranks; the first that is there counts.
_LAUNCHED = {
    "nproc-per-node": "nproc-per-node gpus-per-node num-gpus gres ntasks-per-node",
    "nnodes": "nnodes nodes num-nodes num-machines N",
    "world-size": "world-size num-processes np ntasks n",
}


def _put_launchers(arguments: Arguments, documents: Sequence[Document]) -> None:
    """The ranks and nodes of launchers, by the names that `torchrun` has for them."""
    for document in documents:
        options = {name.replace("_", "-"): value for name, value in document.launcher.items()}
        for flag, names in _LAUNCHED.items():
            if flag == "world-size" and "nproc-per-node" in arguments.flags:
                continue
            for name in names.split():
                text = str(options.get(name, ""))
                match = re.search(r"(\d+)$", text)
                if (match or missing(text)) and (name != "n" or "nnodes" not in arguments.flags):
                    arguments.flags.setdefault(flag, match[1] if match else text)
                    arguments.origins.setdefault(flag, (name, document.name))
                    break


def _model(
    arguments: Arguments, read: Reader, config: Document | None, main: Framework
) -> tuple[Table, str, Status]:
    """The table of the model, the file that it is from (its own, of a name, or of the flags), and
    whether its type is known.
    """
    names = [flag for flag in ("model-name", "model-flavor") if flag in arguments.flags]
    named = " ".join(str(arguments.flags[flag]) for flag in names)
    table, name = (None, "") if config is None else (config.table, config.name)
    sizes = {"hidden-size", "num-layers"} & {*arguments.flags}
    if table is None and named and not sizes:
        name = f"the model that {arguments.origin(names[0])} names"
        table = well_known(named)
        if table is None:
            read.problems.add(
                f"the model `{quoted(named)}`, which is not known here: give its `config.json` as "
                "another FILE"
            )
            read.problems.check()
    if table is None and not sizes and not main.is_megatron:
        read.problems.add("no file says the model: give its `config.json` as another FILE")
        read.problems.check()
    if table is None:
        return model_of(read), "", "imported"
    draft = read_hugging_face(table, 1, strict=read.strict)
    if not {"seq-length", "max-position-embeddings"} & {*arguments.flags}:
        length = draft.tables["training"]["sequence_length"]
        arguments.flags["seq-length"] = length
        read.notes.append(f"No file says the length of sequences, so it is {length:,} tokens.")
    read.notes.extend(note for note in draft.notes if note)
    return dict(draft.tables["model"]), name, draft.status


def without_left_out(table: Mapping[str, Any], leave_out: Iterable[str]) -> dict[str, Any]:
    """The table of a model without keys that are left out.

    **Raises:**

    A `ValueError` for one that it does not have.
    """
    remaining = dict(table)
    for key in leave_out:
        if key not in remaining:
            raise ValueError(f"`--leave-out {quoted(key)}` is not in the file.")
        del remaining[key]
    return remaining


@ft.cache
def _well_known() -> dict[str, dict[str, Any]]:
    text = pathlib.Path(__file__).with_name("well_known.toml").read_text(encoding="utf-8")
    models = tomllib.loads(text)["models"]
    return {_short(name): model for model in models for name in model.pop("names")}


# What names of models have that does not change their shape.
_VARIANTS = re.compile(
    r"[-_ ](?:instruct|chat|base|hf|it|bf16|fp8|fp4|pretrain|sft|lora|v0\.\d|\d{4}|thinking|\d+k)\b"
)


def _short(name: str) -> str:
    name = name.lower().removesuffix(".yaml").removesuffix(".json").rstrip("/").rpartition("/")[2]
    name = _VARIANTS.sub("", _VARIANTS.sub("", name))
    return re.sub(r"[^a-z0-9.]|^meta-?", "", name)


def well_known(name: str) -> dict[str, Any] | None:
    """The configuration of a model by its name, such as `meta-llama/Llama-3.1-8B` or `llama3 8B`;
    `None` if it is not known.
    """
    return _well_known().get(_short(name))


def _keep_given(job: Table, arguments: Arguments, main: Framework) -> dict[str, str]:
    """Where each key of a job's tables is from. Of a framework that is not Megatron-LM, keys of
    training and schedule that no file says are taken out: its software stack gives them.
    """
    comments: dict[str, str] = {}
    kept = ["microbatch_size", "sequence_length", "dtype"]
    if job["training"]["dtype"] in ("fp32", "tf32"):
        kept.append("attention")  # No stack is of float32.
    for key, flags in framework("megatron").table["sets"].items():
        table, _, name = key.partition(".")
        if not name or name not in job.get(table, {}):
            continue
        where = [arguments.origin(flag) for flag in flags.split() if flag in arguments.origins]
        where = [*dict.fromkeys(text for text in where if text)]
        if where:
            comments[key] = ", ".join(where[:3])
        elif main.table.get("fills", False):
            comments[key] = f"by default of {main.table['title']}"
        elif table == "training" and name not in kept:
            del job[table][name]
    return comments


def _put_keys(job: Table, arguments: Arguments, comments: dict[str, str]) -> None:
    """Sets the keys of a job that the files say as they are."""
    for key, value in arguments.flags.items():
        if "." not in key:
            continue
        *sections, name = key.split(".")
        table = job
        for section in sections:
            table = table.setdefault(section, {})
        word = value.strip().lower() if isinstance(value, str) else value
        number = re.fullmatch(r"-?\d{1,18}", word) if isinstance(word, str) else None
        is_switch = word in ("true", "false")
        table[name] = int(word) if number else word == "true" if is_switch else word
        comments[key] = arguments.origin(key)


def wanted(document: Document) -> list[str]:
    """A clause for each script that a script reads and that is not at hand."""
    return [
        f"{document.name} reads `{quoted(name)}`, which is not here: give it as another FILE"
        for name in dict.fromkeys(document.wanted)
    ]


def _stack(main: Framework, keys: Iterable[str]) -> tuple[str | None, str]:
    """The software stack of a framework, or of several that of the time of the keys of its files,
    and a sentence that says why.
    """
    title, stack = main.table["title"], main.table.get("stack")
    if "stacks" in main.table:
        word, used = "flag" if "sets" in main.table else "key", {*map(usual, keys)}
        for stack, older in main.table["stacks"].items():
            for key in (key for key in usual(older).split() if key in used):
                return stack, (
                    f"Newer versions of {title} have no {word} `{key}`, so the software stack is "
                    f"`{stack}`; `--software` gives another."
                )
        return stack, (
            f"No {word} is one that only older versions of {title} have, so the software stack is "
            f"the newest of {title}, `{stack}`; `--software` gives another."
        )
    if stack is None:
        return None, (
            f"No software stack of {title} was measured, so none sets keys of `[training]`; "
            "`--software` gives one."
        )
    return stack, f"The software stack is that of {title}, `{stack}`; `--software` gives another."
