"""Makes a draft of a job from training files of any framework, and the model's file beside them."""

import functools as ft
import math
import pathlib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .._misc import quoted
from ._documents import Document
from ._draft import Batch, Draft, Status
from ._frameworks import Arguments, Framework, framework_of, translate
from ._hugging_face import read_hugging_face
from ._megatron import DEGREES, USUAL_NODE, gpus_of, has_experts, least_gpus, read_megatron
from ._megatron_flags import reader_of, stack_of, tables
from ._megatron_model import model_of
from ._problems import NotImportableError, Reader, Table, is_off
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
    *,
    strict: bool = False,
    leave_out: Iterable[str] = (),
    replaced: Collection[str] = (),
) -> tuple[Draft, int]:
    """What training files say of a job, and its number of GPUs.

    **Arguments:**

    - `documents`: the files.
    - `config`: the `config.json` of the model, if there is one.
    - `num_gpus`: the number of GPUs; by default that of the launcher.
    - `strict`, `leave_out`: as in `import_job`.
    - `replaced`: the keys of the job that are given beside the files.

    **Raises:**

    `NotImportableError` with everything that a job cannot express.
    """
    pairs = [(document, one) for document in documents if (one := framework_of(document))]
    if not pairs:
        raise ValueError("no file has keys of a framework that is known here; give another file.")
    # A command's options replace those of the files that it names.
    pairs.sort(key=lambda pair: pair[0].kind == "command")
    main = max(pairs, key=lambda pair: len(pair[0].keys))[1]
    found = translate(pairs, leave_out, strict)
    _put_launchers(found, documents)
    if hook := _HOOKS.get(main.name):
        hook(found)
    for degree in DEGREES.values():
        if str(found.flags.get(degree)) == "0":  # As one, in GPT-NeoX.
            del found.flags[degree]
    if not _is_megatron(main) and "micro-batch-size" in found.flags:
        found.flags.setdefault("num-microbatches", 1)  # None of them accumulates by default.
    read = reader_of(found, strict, replaced)
    model, comment, status = _model(found, read, config, main)
    gpus = num_gpus or gpus_of(read)
    least = least_gpus(read, has_experts(model)) if read.sound(*DEGREES.values()) else 1
    if not gpus:
        read.problems.check()
        sizes = [str(found.flags.get(flag)) for flag in ("nnodes", "nproc-per-node", "world-size")]
        raise GpusNotSaidError(least, main.name, missing(" ".join(sizes)))
    if num_gpus is None and gpus % least:
        more = -(-gpus // least) * least
        read.notes.append(
            f"The launcher has {gpus} GPUs, of which the degrees make no replica, so the job has "
            f"{more}; `--gpus` gives another number."
        )
        gpus = more
    if found.flags.get("shards-in-a-node") and gpus % USUAL_NODE == 0:
        found.job["training.optimizer_instances"] = gpus // USUAL_NODE
        found.origins["training.optimizer_instances"] = found.origins["training.zero"]
    job = read_megatron(read, gpus, model)
    comments = _keep_given(job, found, main)
    _put_keys(job, found, comments)
    for key in [*job["model"]] if comment else ():
        comments[f"model.{key}"] = comment
    for document in documents:
        read.notes.extend(f"{clause}, if it says more." for clause in wanted(document))
    names = [key for document, _ in pairs for key in document.keys]
    software, why = _stack(main, names)
    batch = job["schedule"].get("num_microbatches", 1) * job["layout"]["dp"]
    is_said = "global-batch-size" in read or "num-microbatches" in read
    of_step = Batch(batch * job["training"]["microbatch_size"]) if is_said else None
    asked = "" if _is_megatron(main) else _ASK
    return Draft(job, read.notes, main.name, of_step, asked, status, software, why, comments), gpus


_ASK = "the batch is not known; give the sequences of a step with `--batch`"


def _is_megatron(one: Framework) -> bool:
    """Whether flags of Megatron-LM say the model and the batch."""
    return "megatron" in (one.name, one.table.get("like"))


# What launchers call the ranks of a node, the nodes, and all ranks; the first that is there counts.
_LAUNCHED = {
    "nproc-per-node": "nproc-per-node gpus-per-node num-gpus gres ntasks-per-node",
    "nnodes": "nnodes nodes num-nodes num-machines N",
    "world-size": "world-size num-processes np ntasks n",
}


def _put_launchers(found: Arguments, documents: Sequence[Document]) -> None:
    """The ranks and nodes of launchers, by the names that `torchrun` has for them."""
    for document in documents:
        options = {name.replace("_", "-"): value for name, value in document.launcher.items()}
        for flag, names in _LAUNCHED.items():
            if flag == "world-size" and "nproc-per-node" in found.flags:
                continue
            for name in names.split():
                text = str(options.get(name, ""))
                match = re.search(r"(\d+)$", text)
                if (match or missing(text)) and (name != "n" or "nnodes" not in found.flags):
                    found.flags.setdefault(flag, match[1] if match else text)
                    found.origins.setdefault(flag, (name, document.name))
                    break


def _model(
    found: Arguments, read: Reader, config: Document | None, main: Framework
) -> tuple[Table, str, Status]:
    """The table of the model, the file that it is from (its own, of a name, or of the flags), and
    whether its type is known.
    """
    named = " ".join(found.models[key] for key in sorted(found.models))
    table, name = (None, "") if config is None else (config.table, config.name)
    sizes = {"hidden-size", "num-layers"} & {*found.flags}
    if table is None and named and not sizes:
        name = f"the model that {_origin(found, next(iter(found.models)))} names"
        table = well_known(named)
        if table is None:
            read.problems.add(
                f"the model `{quoted(named)}`, which is not known here: give its `config.json` as "
                "another FILE"
            )
            read.problems.check()
    if table is None and not sizes and not _is_megatron(main):
        read.problems.add("no file says the model: give its `config.json` as another FILE")
        read.problems.check()
    if table is None:
        return model_of(read), "", "imported"
    draft = read_hugging_face(table, 1, strict=read.strict)
    if not {"seq-length", "max-position-embeddings"} & {*found.flags}:
        length = draft.tables["training"]["sequence_length"]
        found.flags["seq-length"] = length
        read.notes.append(f"No file says the length of sequences, so it is {length:,} tokens.")
    read.notes.extend(note for note in draft.notes if note)
    return dict(draft.tables["model"]), name, draft.status


def without_keys(table: Mapping[str, Any], leave_out: Iterable[str]) -> dict[str, Any]:
    """The table of a model without keys that are left out.

    **Raises:**

    A `ValueError` for one that it does not have.
    """
    left = dict(table)
    for key in leave_out:
        if key not in left:
            raise ValueError(f"`--leave-out {quoted(key)}` is not in the file.")
        del left[key]
    return left


def _origin(found: Arguments, target: str) -> str:
    key, file = found.origins.get(target, ("", ""))
    return f"`{key}` in {file}" if key else file


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


def _keep_given(job: Table, found: Arguments, main: Framework) -> dict[str, str]:
    """Where each key of a job's tables is from. Of a framework that is not Megatron-LM, keys of
    training and schedule that no file says are taken out: its software stack gives them.
    """
    comments: dict[str, str] = {}
    kept = ["microbatch_size", "sequence_length", "dtype"]
    if job["training"]["dtype"] in ("fp32", "tf32"):
        kept.append("attention")  # No stack is of float32.
    for key, flags in tables()["sets"].items():
        table, _, name = key.partition(".")
        if not name or name not in job.get(table, {}):
            continue
        where = [_origin(found, flag) for flag in flags.split() if flag in found.origins]
        where = [*dict.fromkeys(text for text in where if text)]
        if where:
            comments[key] = ", ".join(where[:3])
        elif main.table.get("fills", False):
            comments[key] = f"by default of {main.table['title']}"
        elif table == "training" and name not in kept:
            del job[table][name]
    return comments


def _put_keys(job: Table, found: Arguments, comments: dict[str, str]) -> None:
    """Sets the keys of a job that the files say as they are."""
    for key, value in found.job.items():
        *sections, name = key.split(".")
        table = job
        for section in sections:
            table = table.setdefault(section, {})
        word = value.strip().lower() if isinstance(value, str) else value
        number = re.fullmatch(r"-?\d{1,18}", word) if isinstance(word, str) else None
        is_switch = word in ("true", "false")
        table[name] = int(word) if number else word == "true" if is_switch else word
        comments[key] = _origin(found, key)


def wanted(document: Document) -> list[str]:
    """A clause for each script that a script reads and that is not at hand."""
    return [
        f"{document.name} reads `{quoted(name)}`, which is not here: give it as another FILE"
        for name in dict.fromkeys(document.wanted)
    ]


def _stack(main: Framework, names: Iterable[str]) -> tuple[str | None, str]:
    if "stacks" in main.table:
        return stack_of(main.table, names)
    stack = main.table.get("stack")
    if stack is None:
        return None, (
            f"No software stack of {main.table['title']} was measured, so none sets keys of "
            "`[training]`; `--software` gives one."
        )
    return stack, (
        f"The software stack is that of {main.table['title']}, `{stack}`; `--software` gives "
        "another."
    )


def _product(found: Arguments, target: str, *flags: str) -> None:
    """Sets a flag to the product of others, if all are whole numbers above zero."""
    values = [str(found.flags.pop(flag, 1)) for flag in flags]
    if all(re.fullmatch(r"[1-9]\d{0,8}", value) for value in values):
        found.flags[target] = math.prod(map(int, values))
        found.origins[target] = next(
            (found.origins[flag] for flag in flags if flag in found.origins), ("", "")
        )


def _shards(found: Arguments) -> None:
    """All replicas are shards times copies (and, of axolotl, times its expert-parallel ranks); each
    copy has its own optimizer's states, and without shards there is nothing to gather.
    """
    shards, copies = (str(found.flags.get(flag, "")) for flag in ("shards", "copies"))
    if re.fullmatch(r"[1-9]\d{0,8}", copies) and copies != "1":
        whole = {"training.zero": 0} if shards == "1" else {}
        found.job |= whole or {"training.optimizer_instances": int(copies)}
    if shards:  # Without them, they are all that is left.
        _product(found, "data-parallel-size", "shards", "copies")
    found.flags.pop("copies", None)


def _transformers(found: Arguments) -> None:
    """DeepSpeed keeps weights and gradients in 16 bits, and LLaMA-Factory recomputes all layers,
    each unless it is told not to; Megatron-Core's layers have keys of their own.
    """
    job, flags = found.job, found.flags
    if "seq-length" in flags:
        found.problems.note(
            f"All sequences are taken to have the {flags['seq-length']} tokens of "
            f"{_origin(found, 'seq-length')}, as if packed; shorter ones take less time."
        )
    if flags.pop("recomputes-by-default", False) and not {*DEGREES.values()} & {*flags}:
        job.setdefault("training.recompute", "full")
    if re.search("zero|deepspeed", found.origins.get("training.zero", ("", ""))[0]):
        half = next((flag for flag in ("fp16", "bf16") if not is_off(flags.get(flag))), "fp32")
        for key in ("training.gather_dtype", "training.gradient_dtype"):
            job.setdefault(key, half)
            found.origins.setdefault(key, found.origins["training.zero"])


def _axolotl(found: Arguments) -> None:
    """A rank of experts is no shard of the data's."""
    _shards(found)
    experts = found.flags.get(DEGREES["ep"])
    if "data-parallel-size" in found.flags and experts is not None:
        _product(found, "data-parallel-size", "data-parallel-size", DEGREES["ep"])
        found.flags[DEGREES["ep"]] = experts
    _transformers(found)


def _gpt_neox(found: Arguments) -> None:
    """The width of a gated MLP is a third of what is said, up to a multiple, as in
    `megatron/model/transformer.py`; without it two thirds of the usual one.
    """
    flags = found.flags
    texts = [str(flags.get(flag, "")) for flag in ("ffn-hidden-size", "hidden-size")]
    multiple = str(flags.pop("mlp-multiple-of", 1))
    said, hidden = (int(text) if re.fullmatch(r"[1-9]\d{0,8}", text) else 0 for text in texts)
    gated = any(not is_off(flags.get(flag)) for flag in ("swiglu", "quick-geglu"))
    if gated and (said or hidden) and re.fullmatch(r"[1-9]\d{0,8}", multiple):
        width = said // 3 if said else 8 * hidden // 3
        flags["ffn-hidden-size"] = -(-width // int(multiple)) * int(multiple)
        if said:
            found.problems.note(
                f"Of the {said:,} columns that {_origin(found, 'ffn-hidden-size')} says, a gated "
                f"MLP of GPT-NeoX 2024 has a third, {flags['ffn-hidden-size']:,}."
            )


def _torchtitan(found: Arguments) -> None:
    """Shards times copies are all replicas, unless the shards are what is left (-1); a pipeline
    cuts the batch of a replica into microbatches.
    """
    _shards(found)
    if "fp8-format" not in found.flags:  # Of a converter that is not on.
        found.job.pop("training.gather_dtype", None)
    if str(found.flags.get("global-batch-size", "")).startswith("-"):
        del found.flags["global-batch-size"]
    local = str(found.flags.get("micro-batch-size", ""))
    pp = str(found.flags.get("pipeline-model-parallel-size", "1"))
    size = str(found.flags.pop("pipeline-microbatch", "1"))
    if pp not in ("", "1") and local.isdigit() and size.isdigit():
        found.flags |= {
            "micro-batch-size": size,
            "num-microbatches": max(1, int(local) // int(size)),
        }


def _maxtext(found: Arguments) -> None:
    """A degree is the product of an axis within slices and one between them; an axis of -1 has what
    is left. The batch of a device is that of a replica over its devices.
    """
    flags, devices = found.flags, 1
    if not all(str(flags.get(f"{of}-ts", "1")) == "1" for of in ("ici", "dcn")):
        found.job["training.sequence_parallel"] = True
    axes = {"tp": "tp ts tt", "pp": "pp", "cp": "cp", "ep": "ep", "fsdp": "fsdp ft", "dp": "dp"}
    for axis, names in axes.items():
        sizes = [str(flags.pop(f"{of}-{n}", "1")) for of in ("ici", "dcn") for n in names.split()]
        size = math.prod(int(text) for text in sizes if re.fullmatch(r"[1-9]\d{0,8}", text))
        devices = devices * size if not any(text.startswith("-") for text in sizes) else 0
        if axis in DEGREES and size > 1:
            flags[DEGREES[axis]] = size
            found.origins[DEGREES[axis]] = found.origins.get(f"ici-{axis}", ("", ""))
    if devices > 1:
        flags.setdefault("world-size", devices)
    each = str(flags.pop("sequences-a-device", ""))
    ranks = math.prod(int(flags.get(DEGREES[axis], 1)) for axis in ("tp", "pp", "cp"))
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", each):
        said, pp = str(flags.pop("pipeline-microbatches", "")), flags.get(DEGREES["pp"], 1)
        pieces = int(said) if re.fullmatch(r"[1-9]\d{0,5}", said) else max(1, int(pp))
        flags["micro-batch-size"] = max(1, round(float(each) * ranks / pieces))
        found.origins["micro-batch-size"] = found.origins["sequences-a-device"]
        flags.setdefault("num-microbatches", pieces)


_HOOKS: Mapping[str, Any] = {
    "axolotl": _axolotl,
    "gpt-neox": _gpt_neox,
    "maxtext": _maxtext,
    "torchtitan": _torchtitan,
    "transformers": _transformers,
}
