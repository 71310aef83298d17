"""Makes a job from a configuration of Hugging Face. It has no training, so that published batches
are known here.
"""

import re
from collections.abc import Mapping

from .._misc import quoted
from ._draft import Batch, Draft
from ._models import ARCHITECTURES
from ._problems import Reader, Table


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

# By `model_type`, width, number of layers and size of the vocabulary. Touvron et al. 2023 say 4
# million tokens for all sizes, Moonshot AI 67 million and Zhipu AI 64 million.
_LLAMA_2 = Batch(1024, 4096, "Touvron et al. 2023, arXiv:2307.09288")
_PUBLISHED = {
    ("llama", 4096, 32, 32000): _LLAMA_2,
    ("llama", 5120, 40, 32000): _LLAMA_2,
    ("llama", 8192, 80, 32000): _LLAMA_2,
    ("llama", 16384, 126, 128256): Batch(2048, 8192, "Llama 3, arXiv:2407.21783"),
    ("deepseek_v2", 2048, 27, 102400): Batch(4608, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v2", 5120, 60, 102400): Batch(9216, 4096, "DeepSeek-V2, arXiv:2405.04434"),
    ("deepseek_v3", 7168, 61, 129280): Batch(15360, 4096, "DeepSeek-V3, arXiv:2412.19437"),
    ("kimi_k2", 7168, 61, 163840): Batch(16384, 4096, "Kimi K2, arXiv:2507.20534"),
    ("glm4_moe", 5120, 92, 151552): Batch(16384, 4096, "GLM-4.5, arXiv:2508.06471"),
    ("gpt2", 1600, 48, 50257): Batch(512, 1024, "Radford et al. 2019"),
}


def read_hugging_face(
    config: Mapping[str, object], num_gpus: int, *, strict: bool = False
) -> Draft:
    """What a `config.json` says of a job.

    **Arguments:**

    - `config`: the table of the file.
    - `num_gpus`: the number of GPUs of the job.
    - `strict`: whether what is not known is refused in place of a note.

    **Raises:**

    `ValueError` for an unknown architecture, and for sizes that are missing or contradict
    each other.
    """
    read = _reader(config, strict)
    tables = _tables(read, num_gpus)
    return Draft(
        tables,
        read.notes,
        "huggingface",
        batch=_published_batch(read.text("model_type"), tables["model"]),
        question="the batch is not known; give the sequences of a step with `--batch`",
        why_software=_NO_STACK,
    )


def _reader(config: Mapping[str, object], strict: bool) -> Reader:
    """Reads a configuration, or that of its part for text."""
    text = config.get("text_config")
    read = Reader({**config, **text} if isinstance(text, dict) else config, strict=strict)
    if isinstance(text, dict):
        read.notes.append("Only the model of text is imported, without what reads images or sound.")
        for key in ("text_config", "vision_config", "audio_config"):
            read.get(key)
    return read


def _tables(read: Reader, num_gpus: int) -> Table:
    """The tables `model`, `layout`, `schedule` and `training` of a job. A configuration describes
    only the model, so the rest has simple defaults: replicas only, one microbatch of one sequence,
    bfloat16.
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


def _published_batch(kind: str, model: Table) -> Batch | None:
    """The batch of a model of a `model_type`, if its shape is that of a published one."""
    layers = model.get("num_layers") or sum(layer["repeat"] for layer in model["layers"])
    return _PUBLISHED.get((kind, model["hidden_size"], layers, model["vocab_size"]))


_NO_STACK = (
    "A configuration of Hugging Face does not say which software trains the model, so no stack "
    "sets keys of `[training]`, and the host launches kernels in no time; `--software` gives a "
    "stack, such as `megatron-core-2024` or `torchtitan`."
)
