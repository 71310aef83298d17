"""Makes a job from a `config.json` of Hugging Face."""

import re
from collections.abc import Callable, Mapping

from .._misc import quoted
from ._dense_models import gemma, gpt2, gpt_neox, llama, qwen2, qwen3
from ._expert_models import deepseek, glm4_moe, gpt_oss, llama4, mixtral, qwen3_next, qwen_moe
from ._problems import InexpressibleError, Reader, Table


# Keys about experts, windows, latents and states. The excluded keys are about routing and losses,
# which a job does not have.
_STRUCTURE = re.compile(
    r"expert|moe|window|layer_types|lora|ssm|mamba|vision|audio|nextn|attn_layer"
)
_HARMLESS = {
    "ep_size",
    "experts_per_token",
    "max_window_layers",
    "moe_layer_freq",
    "norm_topk_prob",
    "num_experts_per_token",
    "routed_scaling_factor",
    "use_sliding_window",
}

# The model's longest sequence, but at most the usual length in pre-training.
_LONGEST = 8192


def hugging_face_reader(config: Mapping[str, object], *, strict: bool = False) -> Reader:
    """Reads a configuration, or that of its part for text."""
    text = config.get("text_config")
    read = Reader({**config, **text} if isinstance(text, dict) else config, strict=strict)
    if isinstance(text, dict):
        read.notes.append("Only the model of text is imported, without what reads images or sound.")
        for key in ("text_config", "vision_config", "audio_config"):
            read.get(key)
    return read


def read_hugging_face(read: Reader, num_gpus: int, where: str) -> Table:
    """The tables `model`, `layout`, `schedule` and `training` of a job. A configuration describes
    only the model, so the rest has simple defaults: replicas only, one microbatch of one sequence,
    bfloat16.

    **Arguments:**

    - `read`: the table of the file; gets notes about what was assumed.
    - `num_gpus`: the number of GPUs of the job.
    - `where`: the origin of the table, for messages.

    **Raises:**

    `InexpressibleError` for an unknown architecture, and for sizes that are missing or contradict
    each other.
    """
    kind = read.text("model_type")
    if kind not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        problem = f"`model_type` {quoted(kind) or 'is missing'}; known are only {known}"
        raise InexpressibleError(where, [problem])
    model = _ARCHITECTURES[kind](read)
    longest = read.count("max_position_embeddings", read.count("n_positions", _LONGEST))
    read.problems += [f"`{key}`" for key in read.unread() if _changes(key, read.get(key))]
    if read.problems:
        raise InexpressibleError(where, read.problems)
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


_ARCHITECTURES: dict[str, Callable[[Reader], Table]] = {
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_moe": qwen_moe,
    "qwen3_moe": qwen_moe,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "llama4_text": llama4,
    "qwen3_next": qwen3_next,
    "gemma": gemma,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
}
