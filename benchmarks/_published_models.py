"""Models of published rows, from the columns and the names of the models."""

import functools as ft
import re
from typing import Any

import msgspec

from prism_jax import data


# What the names of the models say; GPT is what is not named here.
_LLAMA: dict[str, Any] = {"activation": "swiglu", "position": "rotary", "norm": "rmsnorm"}
_LLAMA |= {"bias": False, "tied_embeddings": False}
GPT: dict[str, Any] = {"dropout": True}
_KINDS: dict[str, dict[str, Any]] = {
    "llama|internlm|qwen|mixtral": _LLAMA,
    "nemotron": {**_LLAMA, "activation": "squared_relu", "norm": "layernorm"},
    "grok": {**_LLAMA, "activation": "geglu"},
    "mpt": {"bias": False},
}
# Models whose layers no column says; those of another generation than the name stay unknown.
_SHIPPED = {
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
    "gptoss120b": "gpt-oss-120b",
    "gptoss20b": "gpt-oss-120b",
    "kimik2": "kimi-k2",
    "mixtral8x7b": "mixtral-8x7b",
    "mixtral8x22b": "mixtral-8x22b",
    "nemotron3nano": "nemotron-3-nano",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "qwen330ba3b": "qwen3-30b-a3b",
}
_WITH_EXPERTS = "deepseek|qwen3|oss|kimi|nemotron.?3|mixtral|grok"


def has_experts(row: dict[str, str]) -> bool:
    """Whether the name of a row's model is that of one with experts."""
    return re.search(_WITH_EXPERTS, row["model"].lower()) is not None


def _shipped_name(row: dict[str, str]) -> str:
    name = re.sub("[^a-z0-9]", "", row["model"].partition("(")[0].lower())
    return _SHIPPED.get(name.removesuffix("671b"), "")


def is_known(row: dict[str, str]) -> bool:
    """Whether its layers are those of a shipped model, or in its columns."""
    return bool(_shipped_name(row) or row.get("experts"))


_shipped_model = ft.cache(data.load_model)


def model_of(row: dict[str, str]) -> data.Model:
    """The model of a row."""
    if shipped := _shipped_name(row):
        model = _variant(_shipped_model(shipped), row)
        return _as_routed(model) if row.get("balance", "").startswith("dropless") else model

    def number(key: str, default: str = "") -> int:
        return int(float(row.get(key) or default))

    name = row["model"].lower()
    kind = next((keys for part, keys in _KINDS.items() if re.search(part, name)), GPT)
    layers = _layers_with_experts(number) if row.get("experts") else {}
    return data.Model(
        num_layers=number("layers"),
        hidden_size=number("hidden"),
        num_heads=number("heads"),
        num_kv_heads=number("kv_heads"),
        head_size=number("head_dim", "0") or None,
        ffn_size=number("ffn"),
        vocab_size=number("vocab"),
        max_positions=number("seq") if name.startswith("mpt") else 2048,
        **kind,
        **layers,
    )


def _layers_with_experts(number: Any) -> dict[str, Any]:
    dense = number("dense_layers", "0")
    kinds = ((dense, "mlp"), (number("layers") - dense, "moe"))
    layers = (data.Layer(("attention", last), count) for count, last in kinds if count)
    moe = {"num_experts": number("experts"), "top_k": number("topk")}
    moe |= {"expert_ffn_size": number("expert_ffn")}
    if shared := number("shared_ffn", "0"):
        moe |= {"shared_ffn_size": shared}
    return {"layers": tuple(layers), "modules": {"moe": moe}}


def _as_routed(model: data.Model) -> data.Model:
    """A model whose router is as it is, without a forced balance."""
    assert model.modules is not None
    moe = {**model.modules["moe"], "balance": "dropless"}
    return msgspec.structs.replace(model, modules={**model.modules, "moe": moe})


def _variant(model: data.Model, row: dict[str, str]) -> data.Model:
    """A shipped model, as the brackets after its name and its columns say."""
    name, _, variant = row["model"].partition(" (")
    if count := re.match(r"(\d+) layers", variant):
        return _first_layers(model, int(count[1]))
    if re.search(r"\b20b", name.lower()):  # The smaller gpt-oss has fewer layers and experts.
        assert model.layers is not None
        assert model.modules is not None
        pairs = msgspec.structs.replace(model.layers[0], repeat=int(float(row["layers"])) // 2)
        moe = {**model.modules["moe"], "num_experts": int(row["experts"])}
        return msgspec.structs.replace(
            model, layers=(pairs,), num_layers=pairs.repeat, modules={**model.modules, "moe": moe}
        )
    layout = row.get("pipeline_layout", "")
    further = 0 if variant.startswith("w/o MTP") or (layout and "m" not in layout) else None
    if further is None and re.search("zoo|Automodel", row["source"]):
        further = 0
    return msgspec.structs.replace(
        model, num_mtp_layers=model.num_mtp_layers if further is None else further
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
