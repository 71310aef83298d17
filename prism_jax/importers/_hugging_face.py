"""Makes a job from a `config.json` of Hugging Face."""

import itertools as it
import re
from collections.abc import Callable, Mapping
from typing import Any

from .._misc import quoted
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


def _decoder(read: Reader, *, own_bias: bool = False, **changes: Any) -> Table:
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


def _layers(*groups: tuple[int, str, str], **modules: Table) -> Table:
    layers = [{"repeat": n, "modules": [first, second]} for n, first, second in groups if n]
    return {"layers": layers, "modules": modules}


def _llama(read: Reader) -> Table:
    count = read.layers("num_hidden_layers")
    window = {}
    if "sliding_window" in read:
        window["window"] = read.count("sliding_window")
    return _decoder(read) | _layers((count, "attention", "mlp"), attention=window, mlp={})


def _qwen2(read: Reader) -> Table:
    attention = _window_of_qwen(read) | {"qkv_bias": True}
    layers = _layers((read.layers("num_hidden_layers"), "attention", "mlp"), attention=attention)
    return _decoder(read, bias=False) | layers


def _qwen3(read: Reader) -> Table:
    attention = _window_of_qwen(read) | {"qk_norm": True}
    layers = _layers((read.layers("num_hidden_layers"), "attention", "mlp"), attention=attention)
    return _decoder(read) | layers


def _window_of_qwen(read: Reader) -> Table:
    read.get("sliding_window")
    if read.flag("use_sliding_window"):
        read.problems.append("`use_sliding_window`, which has a window in some layers only")
    return {}


def _qwen_moe(read: Reader) -> Table:
    is_third = read.text("model_type") == "qwen3_moe"
    count = read.layers("num_hidden_layers")
    moe = _experts_of_qwen(read) | ({} if is_third else _shared_expert(read))
    attention = _window_of_qwen(read) | {"qk_norm" if is_third else "qkv_bias": True}
    layers = _layers((count, "attention", "moe"), attention=attention, moe=moe)
    return _decoder(read, bias=False) | layers


def _experts_of_qwen(read: Reader) -> Table:
    if read.count("decoder_sparse_step", 1) != 1 or read.get("mlp_only_layers", []):
        read.problems.append("layers of experts at every other place (`decoder_sparse_step`)")
    return {
        "num_experts": read.count("num_experts"),
        "top_k": read.count("num_experts_per_tok"),
        "expert_ffn_size": read.count("moe_intermediate_size"),
    }


def _shared_expert(read: Reader) -> Table:
    width = read.count("shared_expert_intermediate_size")
    return {"shared_ffn_size": width, "shared_gate": True}


def _experts_of_mixtral(read: Reader) -> Table:
    return {
        "num_experts": read.count("num_local_experts"),
        "top_k": read.count("num_experts_per_tok"),
        "expert_ffn_size": read.count("intermediate_size"),
    }


def _mixtral(read: Reader) -> Table:
    attention = {"window": read.count("sliding_window")} if "sliding_window" in read else {}
    moe = _experts_of_mixtral(read)
    count = read.layers("num_hidden_layers")
    return _decoder(read) | _layers((count, "attention", "moe"), attention=attention, moe=moe)


def _deepseek(read: Reader) -> Table:
    mla = _latents(read)
    count = read.layers("num_hidden_layers")
    model = _decoder(read) | _dense_and_experts(read, count, "mla", mla=mla)
    further = read.count("num_nextn_predict_layers", 0, least=0)
    return model | ({"num_mtp_layers": further} if further else {})


def _glm4_moe(read: Reader) -> Table:
    attention = {"qkv_bias": read.flag("attention_bias"), "qk_norm": read.flag("use_qk_norm")}
    count = read.layers("num_hidden_layers")
    layers = _dense_and_experts(read, count, "attention", attention=attention)
    further = read.count("num_nextn_predict_layers", 0, least=0)
    model = _decoder(read, own_bias=True, bias=False) | layers
    return model | ({"num_mtp_layers": further} if further else {})


def _latents(read: Reader) -> Table:
    mla = {
        "kv_lora_rank": read.count("kv_lora_rank"),
        "qk_head_size": read.count("qk_nope_head_dim"),
        "qk_rope_head_size": read.count("qk_rope_head_dim"),
        "value_head_size": read.count("v_head_dim"),
    }
    if "q_lora_rank" in read:
        mla["q_lora_rank"] = read.count("q_lora_rank")
    return mla


def _dense_and_experts(read: Reader, count: int, first: str, **modules: Table) -> Table:
    """Some layers with an MLP after their first module, and then only layers of experts."""
    moe = {
        "num_experts": read.count("n_routed_experts"),
        "top_k": read.count("num_experts_per_tok"),
        "expert_ffn_size": read.count("moe_intermediate_size"),
        "num_shared_experts": read.count("n_shared_experts", 0, least=0),
    }
    groups = read.count("n_group", 1)
    # "greedy" chooses among all experts, as the first models of this type did.
    if groups > 1 and read.text("topk_method") != "greedy":
        moe |= {"num_groups": groups, "top_k_groups": read.count("topk_group", groups)}
    dense = min(count, read.count("first_k_dense_replace", 0, least=0))
    if read.count("moe_layer_freq", 1) != 1:
        read.problems.append("layers of experts at every other place (`moe_layer_freq`)")
    kinds = (dense, first, "mlp"), (count - dense, first, "moe")
    return _layers(*kinds, **modules, moe=moe)


def _gpt_oss(read: Reader) -> Table:
    count, moe = read.layers("num_hidden_layers"), _experts_of_mixtral(read)
    local = {"kind": "attention", "window": read.count("sliding_window", 128)}
    seen = ["local" if i % 2 == 0 else "attention" for i in range(count)]
    seen = _kinds(read, seen, {"sliding_attention": "local", "full_attention": "attention"})
    layers = _in_turn([(one, "moe") for one in seen], local=local, attention={}, moe=moe)
    return _decoder(read, own_bias=True, bias=read.flag("attention_bias")) | layers


def _llama4(read: Reader) -> Table:
    count, moe = read.layers("num_hidden_layers"), _experts_of_mixtral(read)
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
    attention = {"qk_norm": read.flag("use_qk_norm")}
    layers = _in_turn(names, attention=attention, mlp={}, moe=moe)
    return _decoder(read, ffn_size=read.count("intermediate_size_mlp")) | layers


def _qwen3_next(read: Reader) -> Table:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464) has the matrices of a Mamba-2 mixer,
    where values are the inputs, and keys and queries the inputs and outputs of the states.
    """
    count, every = read.layers("num_hidden_layers"), read.count("full_attention_interval", 4)
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
    attention = _window_of_qwen(read) | {"qk_norm": True}
    names = [(one, "moe") for one in seen]
    layers = _in_turn(names, attention=attention, mamba=mamba, moe=moe)
    return _decoder(read, bias=False) | layers


def _in_turn(names: list[tuple[str, str]], **modules: Table) -> Table:
    """Layers one after another, with equal neighbours merged."""
    runs = [(len([*group]), *name) for name, group in it.groupby(names)]
    return _layers(*runs, **modules)


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


def _gemma(read: Reader) -> Table:
    table = _decoder(read, tied_embeddings=bool(read.get("tie_word_embeddings", True)))
    return table | _layers((read.layers("num_hidden_layers"), "attention", "mlp"))


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
        "num_layers": read.layers("num_hidden_layers"),
        "num_heads": read.count("num_attention_heads"),
        "ffn_size": read.count("intermediate_size"),
        "activation": _activation(read, gated=False),
        "position": "rotary",
        "tied_embeddings": read.flag("tie_word_embeddings"),
        "dropout": any(read.rate(f"{what}_dropout", 0.0) for what in ("hidden", "attention")),
    }


_ARCHITECTURES: dict[str, Callable[[Reader], Table]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "qwen3_next": _qwen3_next,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
