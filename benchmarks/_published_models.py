"""Models of published rows, from the columns and the names of the models."""

import functools as ft
import re
from typing import Any

import msgspec

from prism_jax import data


# What the names of the models say; GPT is what is not named here.
_LLAMA: dict[str, Any] = {"activation": "swiglu", "position": "rotary", "norm": "rmsnorm"}
_LLAMA |= {"bias": False, "tied_embeddings": False}
_MPT: dict[str, Any] = {"bias": False}
GPT: dict[str, Any] = {"dropout": True}
# Models whose layers no column says; those of another generation than the name stay unknown.
_SHIPPED = {
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Kimi_K2": "kimi-k2",
    "Nemotron_3_Nano": "nemotron-3-nano",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
}
_WITH_EXPERTS = "deepseek|qwen|oss|kimi|nemotron|mixtral"


def has_experts(row: dict[str, str]) -> bool:
    """Whether the name of a row's model is that of one with experts."""
    return re.search(_WITH_EXPERTS, row["model"].lower()) is not None


def is_shipped(row: dict[str, str]) -> bool:
    """Whether its layers are those of a shipped model."""
    return row["model"].partition(" (")[0] in _SHIPPED


_shipped_model = ft.cache(data.load_model)


def model_of(row: dict[str, str]) -> data.Model:
    """The model of a row."""
    if is_shipped(row):
        name, _, variant = row["model"].partition(" (")
        model = _shipped_model(_SHIPPED[name])
        if count := re.match(r"(\d+) layers", variant):
            return _first_layers(model, int(count[1]))
        further = 0 if variant.startswith("w/o MTP") else model.num_mtp_layers
        return msgspec.structs.replace(model, num_mtp_layers=further)

    def number(key: str) -> int:
        return int(float(row[key]))

    name = row["model"].lower()
    return data.Model(
        num_layers=number("layers"),
        hidden_size=number("hidden"),
        num_heads=number("heads"),
        num_kv_heads=number("kv_heads"),
        ffn_size=number("ffn"),
        vocab_size=number("vocab"),
        max_positions=number("seq") if name.startswith("mpt") else 2048,
        **(_LLAMA if "llama" in name else _MPT if name.startswith("mpt") else GPT),
    )


def _first_layers(model: data.Model, count: int) -> data.Model:
    """So many layers of a model whose first ones are dense, of which one is, and none of
    multi-token prediction.

    The rows of SimuMax do not say how many of four layers are dense; the peaks of memory that their
    notes print do. `prism.memory` of the same jobs is within 2 % of each of them with one dense
    layer, and where there is no pipeline 13 % above with none and 16 % below with two.
    """
    assert model.layers is not None
    dense, sparse = model.layers
    layers = tuple(
        msgspec.structs.replace(layer, repeat=repeat)
        for layer, repeat in ((dense, 1), (sparse, count - 1))
    )
    return msgspec.structs.replace(model, layers=layers, num_layers=count, num_mtp_layers=0)
