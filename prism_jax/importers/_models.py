"""Models of Hugging Face, by the keys of their `config.json`."""

from collections.abc import Callable, Mapping
from typing import Any

from .._misc import quoted
from ._problems import Reader, Table, merged


def _decoder(read: Reader, *, own_bias: bool = False, **changes: Any) -> Table:
    """The keys for the shape of Llama and its successors.

    **Arguments:**

    - `own_bias`: whether a bias of attention and none of the MLP, or the other way round, is in
        `changes` and in the modules.
    """
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    if "head_dim" not in read:
        read.check_divisor("num_attention_heads", heads, "hidden_size", hidden)
    kv_heads = read.count("num_key_value_heads", heads)
    read.check_divisor("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    bias = read.flag("mlp_bias")
    if read.flag("attention_bias") != bias and not own_bias:
        read.problems.append("`attention_bias` that is not that of the MLP")
    return {
        "hidden_size": hidden,
        "vocab_size": read.count("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": read.count("head_dim", max(1, hidden // heads)),
        "ffn_size": read.count("intermediate_size"),
        "activation": _activation(read),
        "position": "rotary",
        "norm": "rmsnorm",
        "bias": bias,
        "tied_embeddings": read.flag("tie_word_embeddings"),
    } | changes


def _activation(read: Reader, gated: bool = True) -> str:
    name = (
        read.text("hidden_act")
        or read.text("hidden_activation")
        or read.text("activation_function", "silu" if gated else "gelu_new")
    )
    gates = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
    plain = {"gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "relu2": "squared_relu"}
    known = gates if gated else plain
    if name not in known:
        read.problems.append(f"`hidden_act` {quoted(name)}")
    return known.get(name, "gelu")


def _count(read: Reader) -> int:
    return read.layers("num_hidden_layers")


def _layers(names: list[tuple[str, str]], **modules: Table) -> Table:
    return {"layers": merged(names), "modules": modules}


def _llama(read: Reader) -> Table:
    layers = _layers([("attention", "mlp")] * _count(read), attention=read.given(**_WINDOW), mlp={})
    return _decoder(read) | layers


def _mixtral(read: Reader) -> Table:
    attention, moe = read.given(**_WINDOW), _experts(read, *_LOCAL)
    layers = _layers([("attention", "moe")] * _count(read), attention=attention, moe=moe)
    return _decoder(read) | layers


def _qwen(read: Reader) -> Table:
    is_third = read.text("model_type") == "qwen3"
    _check_window(read)
    attention = {"qk_norm" if is_third else "qkv_bias": True}
    layers = _layers([("attention", "mlp")] * _count(read), attention=attention)
    return _decoder(read, **({} if is_third else {"bias": False})) | layers


def _qwen_moe(read: Reader) -> Table:
    is_third = read.text("model_type") == "qwen3_moe"
    count = _count(read)
    moe = _experts_of_qwen(read) | ({} if is_third else _shared_expert(read))
    _check_window(read)
    attention = {"qk_norm" if is_third else "qkv_bias": True}
    layers = _layers([("attention", "moe")] * count, attention=attention, moe=moe)
    return _decoder(read, bias=False) | layers


def _check_window(read: Reader) -> None:
    read.get("sliding_window")
    if read.flag("use_sliding_window"):
        read.problems.append("`use_sliding_window`, which has a window in some layers only")


def _gemma(read: Reader) -> Table:
    model = _decoder(read, tied_embeddings=bool(read.get("tie_word_embeddings", True)))
    return model | _layers([("attention", "mlp")] * _count(read))


def _gpt2(read: Reader) -> Table:
    hidden = read.count("n_embd")
    return {
        "hidden_size": hidden,
        "vocab_size": read.count("vocab_size"),
        "num_layers": read.layers("n_layer"),
        "num_heads": read.count("n_head"),
        "ffn_size": read.count("n_inner", 4 * hidden),
        "activation": _activation(read, gated=False),
        "max_positions": read.count("n_positions", 1024),
        "tied_embeddings": bool(read.get("tie_word_embeddings", True)),
        "dropout": any(read.rate(f"{what}_pdrop", 0.1) for what in ("resid", "embd", "attn")),
    }


def _gpt_neox(read: Reader) -> Table:
    return {
        "hidden_size": read.count("hidden_size"),
        "vocab_size": read.count("vocab_size"),
        "num_layers": _count(read),
        "num_heads": read.count("num_attention_heads"),
        "ffn_size": read.count("intermediate_size"),
        "activation": _activation(read, gated=False),
        "position": "rotary",
        "tied_embeddings": read.flag("tie_word_embeddings"),
        "dropout": any(read.rate(f"{what}_dropout", 0.0) for what in ("hidden", "attention")),
    }


_WINDOW = {"window": "sliding_window"}
# The keys of the number of experts and of their width.
_LOCAL = ("num_local_experts", "intermediate_size")


def _experts(read: Reader, number: str, width: str = "moe_intermediate_size") -> Table:
    return {
        "num_experts": read.count(number),
        "top_k": read.count("num_experts_per_tok"),
        "expert_ffn_size": read.count(width),
    }


def _experts_of_qwen(read: Reader) -> Table:
    if read.count("decoder_sparse_step", 1) != 1 or read.get("mlp_only_layers", []):
        read.problems.append("layers of experts at every other place (`decoder_sparse_step`)")
    return _experts(read, "num_experts")


def _shared_expert(read: Reader) -> Table:
    width = read.count("shared_expert_intermediate_size")
    return {"shared_ffn_size": width, "shared_gate": True}


def _deepseek(read: Reader) -> Table:
    mla = {
        "kv_lora_rank": read.count("kv_lora_rank"),
        "qk_head_size": read.count("qk_nope_head_dim"),
        "qk_rope_head_size": read.count("qk_rope_head_dim"),
        "value_head_size": read.count("v_head_dim"),
    }
    mla |= read.given(q_lora_rank="q_lora_rank")
    count = _count(read)
    return _decoder(read) | _dense_and_experts(read, count, "mla", mla=mla)


def _glm4_moe(read: Reader) -> Table:
    attention = {"qkv_bias": read.flag("attention_bias"), "qk_norm": read.flag("use_qk_norm")}
    layers = _dense_and_experts(read, _count(read), "attention", attention=attention)
    return _decoder(read, own_bias=True, bias=False) | layers


def _dense_and_experts(read: Reader, count: int, first: str, **modules: Table) -> Table:
    """Some layers with an MLP after their first module, then only layers of experts, and layers of
    multi-token prediction.
    """
    moe = _experts(read, "n_routed_experts")
    moe["num_shared_experts"] = read.count("n_shared_experts", 0, least=0)
    groups = read.count("n_group", 1)
    # "greedy" chooses among all experts, as the first models of this type did.
    if groups > 1 and read.text("topk_method") != "greedy":
        moe |= {"num_groups": groups, "top_k_groups": read.count("topk_group", groups)}
    dense = min(count, read.count("first_k_dense_replace", 0, least=0))
    if read.count("moe_layer_freq", 1) != 1:
        read.problems.append("layers of experts at every other place (`moe_layer_freq`)")
    names = [(first, "mlp" if i < dense else "moe") for i in range(count)]
    further = read.count("num_nextn_predict_layers", 0, least=0)
    return _layers(names, **modules, moe=moe) | ({"num_mtp_layers": further} if further else {})


def _gpt_oss(read: Reader) -> Table:
    count, moe = _count(read), _experts(read, *_LOCAL)
    local = {"kind": "attention", "window": read.count("sliding_window", 128)}
    seen = ["local" if i % 2 == 0 else "attention" for i in range(count)]
    seen = _kinds(read, seen, {"sliding_attention": "local", "full_attention": "attention"})
    layers = _layers([(one, "moe") for one in seen], local=local, attention={}, moe=moe)
    return _decoder(read, own_bias=True, bias=read.flag("attention_bias")) | layers


def _llama4(read: Reader) -> Table:
    count, moe = _count(read), _experts(read, *_LOCAL)
    moe["num_shared_experts"] = 1
    every = read.count("interleave_moe_layer_step", 1)
    listed = read.get("moe_layers", [*range(every - 1, count, every)])
    if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
        read.problems.append("`moe_layers` that are no numbers of layers")
        listed = []
    if "attention_chunk_size" in read:
        read.notes.append(
            "In a sequence of more than "
            f"{read.count('attention_chunk_size'):,} tokens (`attention_chunk_size`) all layers "
            "are taken to attend to the whole sequence."
        )
    read.get("layer_types")
    of_experts = {*listed}
    names = [("attention", "moe" if i in of_experts else "mlp") for i in range(count)]
    layers = _layers(names, attention={"qk_norm": read.flag("use_qk_norm")}, mlp={}, moe=moe)
    return _decoder(read, ffn_size=read.count("intermediate_size_mlp")) | layers


def _qwen3_next(read: Reader) -> Table:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464) has the matrices of a Mamba-2 mixer,
    where values are the inputs, and keys and queries the inputs and outputs of the states.
    """
    count, every = _count(read), read.count("full_attention_interval", 4)
    seen = ["mamba" if i % every else "attention" for i in range(1, count + 1)]
    seen = _kinds(read, seen, {"linear_attention": "mamba", "full_attention": "attention"})
    if read.count("linear_key_head_dim") != read.count("linear_value_head_dim"):
        read.notes.append("Keys of the gated delta net are not as wide as its values.")
    mamba = {
        "mamba_num_heads": read.count("linear_num_value_heads"),
        "mamba_head_size": read.count("linear_value_head_dim"),
        "state_size": read.count("linear_key_head_dim"),
        "num_groups": read.count("linear_num_key_heads"),
        "conv_size": read.count("linear_conv_kernel_dim", 4),
    }
    read.notes.append(
        "A gated delta net is taken to be a Mamba-2 mixer with the same matrices, whose scan is "
        "shorter, and the gate on the output of attention is not counted."
    )
    moe = _experts_of_qwen(read) | _shared_expert(read)
    _check_window(read)
    names = [(one, "moe") for one in seen]
    layers = _layers(names, attention={"qk_norm": True}, mamba=mamba, moe=moe)
    return _decoder(read, bias=False) | layers


def _kinds(read: Reader, usual: list[str], known: Mapping[str, str]) -> list[str]:
    """What `layer_types` says of each layer, or else the usual."""
    given = read.get("layer_types", [])
    if not given:
        return usual
    if not isinstance(given, list) or len(given) != len(usual):
        read.problems.append(f"`layer_types` that is no list of {len(usual)} names")
        return usual
    unknown = [kind for kind in given if not isinstance(kind, str) or kind not in known]
    if unknown:
        read.problems.append(f"`layer_types` with {quoted(unknown[0])}")
        return usual
    return [known[kind] for kind in given]


# What makes the table of a model, by its `model_type`.
ARCHITECTURES: dict[str, Callable[[Reader], Table]] = {
    **dict.fromkeys(("llama", "mistral"), _llama),
    **dict.fromkeys(("qwen2", "qwen3"), _qwen),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
