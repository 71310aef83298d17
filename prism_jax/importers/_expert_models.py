"""Models of Hugging Face with experts."""

import itertools as it
from collections.abc import Mapping

from .._misc import quoted
from ._dense_models import decoder, layers_of, window_of_qwen
from ._problems import Reader, Table


def qwen_moe(read: Reader) -> Table:
    is_third = read.text("model_type") == "qwen3_moe"
    count = read.layers("num_hidden_layers")
    moe = _experts_of_qwen(read) | ({} if is_third else _shared_expert(read))
    attention = window_of_qwen(read) | {"qk_norm" if is_third else "qkv_bias": True}
    layers = layers_of((count, "attention", "moe"), attention=attention, moe=moe)
    return decoder(read, bias=False) | layers


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


def mixtral(read: Reader) -> Table:
    attention = {"window": read.count("sliding_window")} if "sliding_window" in read else {}
    moe = _experts_of_mixtral(read)
    count = read.layers("num_hidden_layers")
    return decoder(read) | layers_of((count, "attention", "moe"), attention=attention, moe=moe)


def deepseek(read: Reader) -> Table:
    mla = _latents(read)
    count = read.layers("num_hidden_layers")
    model = decoder(read) | _dense_and_experts(read, count, "mla", mla=mla)
    further = read.count("num_nextn_predict_layers", 0, least=0)
    return model | ({"num_mtp_layers": further} if further else {})


def glm4_moe(read: Reader) -> Table:
    attention = {"qkv_bias": read.flag("attention_bias"), "qk_norm": read.flag("use_qk_norm")}
    count = read.layers("num_hidden_layers")
    layers = _dense_and_experts(read, count, "attention", attention=attention)
    further = read.count("num_nextn_predict_layers", 0, least=0)
    model = decoder(read, own_bias=True, bias=False) | layers
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
    return layers_of(*kinds, **modules, moe=moe)


def gpt_oss(read: Reader) -> Table:
    count, moe = read.layers("num_hidden_layers"), _experts_of_mixtral(read)
    local = {"kind": "attention", "window": read.count("sliding_window", 128)}
    seen = ["local" if i % 2 == 0 else "attention" for i in range(count)]
    seen = _kinds(read, seen, {"sliding_attention": "local", "full_attention": "attention"})
    layers = _in_turn([(one, "moe") for one in seen], local=local, attention={}, moe=moe)
    return decoder(read, own_bias=True, bias=read.flag("attention_bias")) | layers


def llama4(read: Reader) -> Table:
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
    return decoder(read, ffn_size=read.count("intermediate_size_mlp")) | layers


def qwen3_next(read: Reader) -> Table:
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
    attention = window_of_qwen(read) | {"qk_norm": True}
    names = [(one, "moe") for one in seen]
    layers = _in_turn(names, attention=attention, mamba=mamba, moe=moe)
    return decoder(read, bias=False) | layers


def _in_turn(names: list[tuple[str, str]], **modules: Table) -> Table:
    """Layers one after another, with equal neighbours merged."""
    runs = [(len([*group]), *name) for name, group in it.groupby(names)]
    return layers_of(*runs, **modules)


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
