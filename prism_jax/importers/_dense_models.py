"""Models of Hugging Face without experts."""

from typing import Any

from .._misc import quoted
from ._problems import Reader, Table


def decoder(read: Reader, *, own_bias: bool = False, **changes: Any) -> Table:
    """The keys for the shape of Llama and its successors.

    **Arguments:**

    - `own_bias`: whether a bias of attention and none of the MLP, or the other way round, is in
        `changes` and in the modules.
    """
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    if "head_dim" not in read and hidden % heads != 0:
        read.problems.append(
            f"`num_attention_heads` {heads} does not divide `hidden_size` {hidden}"
        )
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads != 0:
        read.problems.append(
            f"`num_key_value_heads` {kv_heads} does not divide `num_attention_heads` {heads}"
        )
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


def layers_of(*groups: tuple[int, str, str], **modules: Table) -> Table:
    layers = [{"repeat": n, "modules": [first, second]} for n, first, second in groups if n]
    return {"layers": layers, "modules": modules}


def llama(read: Reader) -> Table:
    count = read.layers("num_hidden_layers")
    window = {}
    if "sliding_window" in read:
        window["window"] = read.count("sliding_window")
    return decoder(read) | layers_of((count, "attention", "mlp"), attention=window, mlp={})


def qwen2(read: Reader) -> Table:
    attention = window_of_qwen(read) | {"qkv_bias": True}
    layers = layers_of((read.layers("num_hidden_layers"), "attention", "mlp"), attention=attention)
    return decoder(read, bias=False) | layers


def qwen3(read: Reader) -> Table:
    attention = window_of_qwen(read) | {"qk_norm": True}
    layers = layers_of((read.layers("num_hidden_layers"), "attention", "mlp"), attention=attention)
    return decoder(read) | layers


def window_of_qwen(read: Reader) -> Table:
    read.get("sliding_window")
    if read.flag("use_sliding_window"):
        read.problems.append("`use_sliding_window`, which has a window in some layers only")
    return {}


def gemma(read: Reader) -> Table:
    table = decoder(read, tied_embeddings=bool(read.get("tie_word_embeddings", True)))
    return table | layers_of((read.layers("num_hidden_layers"), "attention", "mlp"))


def gpt2(read: Reader) -> Table:
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


def gpt_neox(read: Reader) -> Table:
    return {
        "hidden_size": read.count("hidden_size"),
        "vocab_size": read.count("vocab_size"),
        "num_layers": read.layers("num_hidden_layers"),
        "num_heads": read.count("num_attention_heads"),
        "ffn_size": read.count("intermediate_size"),
        "activation": _activation(read, gated=False),
        "position": "rotary",
        "tied_embeddings": read.flag("tie_word_embeddings"),
        "dropout": any(read.rate(f"{what}_dropout", 0.0) for what in ("hidden", "attention")),
    }
