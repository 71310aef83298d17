"""How kernels run, in arguments of Megatron-LM: from CUDA graphs, and in fp8."""

from ._problems import Reader, Table


_IN_FP8 = {
    "fp8_attention": ("fp8-dot-product-attention", "fp8-multi-head-attention"),
    "fp8_head": ("fp8-output-proj",),
}


def kernels_of(read: Reader) -> Table:
    """The keys of `training` that the arguments switch on."""
    found: Table = {
        key: True for key, names in _IN_FP8.items() if any(read.flag(name) for name in names)
    }
    graphs = _cuda_graphs(read)
    return found if graphs == "none" else {**found, "cuda_graphs": graphs}


def _cuda_graphs(read: Reader) -> str:
    """What CUDA graphs replay."""
    implementation = read.choice("cuda-graph-impl", "none", ("none", "local", "transformer_engine"))
    older = [read.flag("enable-cuda-graph"), read.flag("external-cuda-graph")]
    if implementation == "none" and not any(older):
        return "none"
    return "iteration" if "full_iteration" in read.text("cuda-graph-scope") else "modules"
