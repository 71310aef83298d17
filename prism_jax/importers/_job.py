"""Imports a job from a configuration of another framework. That of Hugging Face has no training, so
that published batches are known here.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .._files import shown
from .._misc import quoted
from ..data import Job, located, make_job, read_text
from ._megatron import megatron_reader, read_megatron
from ._megatron_flags import parse_command, parse_model_config, stack_of
from ._models import ARCHITECTURES
from ._problems import Reader, Table


# Configurations are a few kilobytes.
_MOST = 2**20
_CLUSTER = "dgx-h100"
# Keys about experts, windows, latents and states. The excluded keys are about routing and losses,
# which a job does not have.
_STRUCTURE = re.compile(
    r"expert|moe|window|layer_types|lora|ssm|mamba|vision|audio|nextn|attn_layer"
)
_HARMLESS = {
    *("ep_size", "experts_per_token", "max_window_layers", "moe_layer_freq", "norm_topk_prob"),
    *("num_experts_per_token", "routed_scaling_factor", "use_sliding_window"),
}

# The model's longest sequence, but at most the usual length in pre-training.
_LONGEST = 8192


class _Batch(NamedTuple):
    """A batch of pre-training, the last where it grew.

    **Attributes:**

    - `sequences`: the number of sequences in a step.
    - `length`: the number of tokens in each.
    - `source`: who published it.
    """

    sequences: int
    length: int
    source: str


# By `model_type`, width, number of layers and size of the vocabulary. Touvron et al. 2023 say 4
# million tokens for all sizes, Moonshot AI 67 million and Zhipu AI 64 million.
_LLAMA_2 = _Batch(1024, 4096, "Touvron et al. 2023, arXiv:2307.09288")
_PUBLISHED = {
    ("llama", 4096, 32, 32000): _LLAMA_2,
    ("llama", 5120, 40, 32000): _LLAMA_2,
    ("llama", 8192, 80, 32000): _LLAMA_2,
    ("llama", 16384, 126, 128256): _Batch(2048, 8192, "Llama 3, arXiv:2407.21783"),
    ("deepseek_v2", 2048, 27, 102400): _Batch(4608, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v2", 5120, 60, 102400): _Batch(9216, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v3", 7168, 61, 129280): _Batch(15360, 4096, "DeepSeek-V3, arXiv:2412.19437"),
    ("kimi_k2", 7168, 61, 163840): _Batch(16384, 4096, "Kimi K2, arXiv:2507.20534"),
    ("glm4_moe", 5120, 92, 151552): _Batch(16384, 4096, "GLM-4.5, arXiv:2508.06471"),
    ("gpt2", 1600, 48, 50257): _Batch(512, 1024, "Radford et al. 2019"),
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
    software: str | None = None,
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
    - `overrides`: as in `load_job`. `layout.dp` is adjusted to the other degrees, and microbatches
        to these if the batch is given, published, or in the arguments of Megatron-LM.
    - `batch`: the number of sequences in a step; by default that of Megatron-LM's arguments, or
        the published one of a model of Hugging Face.
    - `software`: the software stack, by its name or the path of a file, that sets what the file
        does not say; by default that of the framework and the time of the file. A configuration of
        Hugging Face says neither, so a job of it has no stack.
    - `strict`: whether flags of Megatron-LM that are not known are refused; by default there is a
        note for each.

    **Raises:**

    `ValueError` of one sentence if the file cannot be read, or with everything in it that a job
    cannot express.
    """
    where, path = shown(path), pathlib.Path(path)
    read, raw, (stack, why) = _read(path, where, num_gpus, strict)
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    raw |= {"cluster": cluster or _CLUSTER, "world_size": num_gpus}
    del raw["layout"]["dp"]  # It follows, as do nodes and, of a known batch, microbatches.
    raw["model"]["source"] = raw["source"] = f"imported from {path.name}"
    raw["name"] = quoted(path.stem)
    keys = {text.replace(" ", "").partition("=")[0] for text in overrides}
    if software is not None and "training.software" in keys:
        both = "`--software` and `training.software`"
        raise ValueError(f"{where}: {both} say the same; give one of them.")
    says_stack = software is None and "training.software" not in keys
    if says_stack:
        software = stack
    if software is not None:
        raw["training"]["software"] = software
    published, asked = None, ""
    if batch is not None and "schedule.num_microbatches" in keys:
        both = "`--batch` and `schedule.num_microbatches`"
        raise ValueError(f"{where}: {both} say the same; give one of them.")
    if batch is None and path.suffix.lower() == ".json" and "schedule.num_microbatches" not in keys:
        published = _published_batch(read.text("model_type"), raw["model"])
        asked = "the batch is not known; give the sequences of a step with `--batch`"
    if published is not None:
        raw["training"]["sequence_length"], asked = published.length, ""
    sequences = batch or (published.sequences if published else 0)
    if "global-batch-size" in read and "schedule.num_microbatches" not in keys:
        sequences = sequences or read.count("global-batch-size")
    if sequences:
        alone = make_job(dict(raw), path, overrides)
        assert alone.training is not None
        dp, size = alone.layout.dp, alone.training.microbatch_size
        if sequences % (dp * size):
            asked = (
                f"a {'published ' * (published is not None and batch is None)}batch of "
                f"{sequences:,} sequences is not a multiple of dp*microbatch_size = {dp}*{size}; "
                "give one with `--batch`"
            )
            if published is None or batch:
                raise ValueError(f"{where}: {asked}.")
        else:
            del raw["schedule"]["num_microbatches"]
            raw["training"]["global_batch_size"] = sequences
    if published is not None and not asked:
        each = f"of {published.length:,} tokens each; {published.source}"
        said = f"The batch is the published one, {sequences:,} sequences ({each})"
        read.notes.append(f"{said}; `--batch` gives another.")
    if says_stack:
        read.notes.append(why)
    job = make_job(raw, path, overrides)
    return Imported(job, tuple(dict.fromkeys(read.notes)), f"{where}: {asked}." if asked else "")


def _published_batch(kind: str, model: Table) -> _Batch | None:
    """The batch of a model of a `model_type`, if its shape is that of a published one."""
    layers = model.get("num_layers") or sum(layer["repeat"] for layer in model["layers"])
    return _PUBLISHED.get((kind, model["hidden_size"], layers, model["vocab_size"]))


def _read(
    path: pathlib.Path, where: str, num_gpus: int, strict: bool
) -> tuple[Reader, Table, tuple[str | None, str]]:
    """What has read a file, the tables of a job that it made, and its software stack."""
    if path.suffix.lower() not in _KINDS:
        raise ValueError(
            f"{where}: give a `.json` of Hugging Face, or the arguments of Megatron-LM as `.yaml`, "
            "`.sh` or `.txt`."
        )
    parse, reader, convert, stack_of = _KINDS[path.suffix.lower()]
    text = read_text(path, _MOST)
    with located(where):
        try:
            table = parse(text)
        except (ValueError, RecursionError) as error:
            problem = quoted(" ".join(str(error).split()).rstrip("."), 160)
            if isinstance(error, json.JSONDecodeError) and not text.rstrip().endswith(("}", "]")):
                problem = "the JSON ends early, as of a download that was cut"
            raise ValueError(f"it cannot be read: {problem}; give another file.") from None
        if not isinstance(table, dict):
            raise ValueError("this is not a table of keys; give a model's configuration.")
        read = reader(table, strict=strict)
        return read, convert(read, num_gpus), stack_of(read)


def _hugging_face_reader(config: Mapping[str, object], *, strict: bool = False) -> Reader:
    """Reads a configuration, or that of its part for text."""
    text = config.get("text_config")
    read = Reader({**config, **text} if isinstance(text, dict) else config, strict=strict)
    if isinstance(text, dict):
        read.notes.append("Only the model of text is imported, without what reads images or sound.")
        for key in ("text_config", "vision_config", "audio_config"):
            read.get(key)
    return read


def _read_hugging_face(read: Reader, num_gpus: int) -> Table:
    """The tables `model`, `layout`, `schedule` and `training` of a job. A configuration describes
    only the model, so the rest has simple defaults: replicas only, one microbatch of one sequence,
    bfloat16.

    **Arguments:**

    - `read`: the table of the file; gets notes about what was assumed.
    - `num_gpus`: the number of GPUs of the job.

    **Raises:**

    `ValueError` for an unknown architecture, and for sizes that are missing or contradict
    each other.
    """
    kind = read.text("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        read.problems.append(f"`model_type` {quoted(kind) or 'is missing'}; known are only {known}")
        read.check()
    model = ARCHITECTURES[kind](read)
    longest = read.count("max_position_embeddings", read.count("n_positions", _LONGEST))
    read.problems += [f"`{key}`" for key in read.unread() if _changes(key, read.get(key))]
    read.check()
    return {
        "model": model,
        "layout": {"dp": num_gpus},
        "schedule": {"kind": "1f1b", "num_microbatches": 1},
        "training": {"microbatch_size": 1, "sequence_length": min(longest, _LONGEST)},
    }


def _changes(key: str, value: object) -> bool:
    """Whether an unread key says that the model differs from the known architectures."""
    if key == "layer_types" and isinstance(value, list):
        return any(kind != "full_attention" for kind in value)
    return bool(value) and _STRUCTURE.search(key) is not None and key not in _HARMLESS


def _no_stack(read: Reader) -> tuple[None, str]:
    return None, (
        "A configuration of Hugging Face does not say which software trains the model, so no stack "
        "sets keys of `[training]`, and the host launches kernels in no time; `--software` gives a "
        "stack, such as `megatron-core-2024` or `torchtitan`."
    )


_Kind = tuple[
    Callable[[str], Any],
    Callable[..., Reader],
    Callable[..., Table],
    Callable[[Reader], tuple[str | None, str]],
]
_Megatron = (megatron_reader, read_megatron, stack_of)
_KINDS: dict[str, _Kind] = {
    ".json": (json.loads, _hugging_face_reader, _read_hugging_face, _no_stack),
    ".yaml": (parse_model_config, *_Megatron),
    ".yml": (parse_model_config, *_Megatron),
    ".sh": (parse_command, *_Megatron),
    ".txt": (parse_command, *_Megatron),
}
