"""Makes a job from the arguments of Megatron-LM: its layout, schedule and training."""

import math
import re

from .._misc import plural, quoted
from ._megatron_model import has_encoder, model_of
from ._problems import MOST_LAYERS, Reader, Table, is_off


# The usual length in pre-training, of a model that has no longest one.
_LONGEST = 8192
_IN_FP8 = {
    "fp8_attention": ("fp8-dot-product-attention", "fp8-multi-head-attention"),
    "fp8_head": ("fp8-output-proj",),
}
_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_MAIN_GRADIENTS = ("main-grads-dtype", "megatron-fsdp-main-grads-dtype")
# By the implementation of a fused loss, what it holds; TE's gradients take the place of the logits.
_LOSSES = {"native": "vocab-parallel-compiled", "te": "fused"}
# The flags of degrees, by their names in a job.
DEGREES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
# The number of GPUs in most nodes.
USUAL_NODE = 8
# Of the optimizer, on which everything else counts.
_IN_FLOAT32 = ("main-params-dtype", "megatron-fsdp-main-params-dtype")
# What counts as a layer if the arguments say so.
_ENDS = {"embedding": "embedding_counts_as_layer", "loss": "head_counts_as_layer"}


def read_megatron(read: Reader, num_gpus: int, model: Table | None = None) -> Table:
    """The tables `model`, `layout`, `schedule` and `training` of a job. Of `training`, what is
    switched on by a flag is off without it, and what other flags choose is left to the software
    stack without them.

    **Arguments:**

    - `read`: from `reader_of`; gets notes about what was left out, and problems.
    - `num_gpus`: the number of GPUs of the job.
    - `model`: the table of the model, if another file says it.

    **Raises:**

    `NotImportableError` with everything that a job cannot express.
    """
    model = model_of(read) if model is None else model
    layout = _layout(read, num_gpus, model)
    training = _training(read, model)
    schedule = _schedule(read, model, layout, training)
    for flag in _IN_FLOAT32:
        read.choice(flag, "fp32", "auto")
    read.check()
    return {"model": model, "layout": layout, "schedule": schedule, "training": training}


def gpus_of(read: Reader) -> int:
    """The number of GPUs that the files say: by their launcher, or by all degrees; 0 if they do
    not.
    """
    if read.text("world-size").isdigit():
        return read.count("world-size")
    ranks = math.prod(read.count(DEGREES[name], 1) for name in ("tp", "pp", "cp"))
    if "data-parallel-size" in read:
        return read.count("data-parallel-size") * ranks
    nodes, per_node = read.text("nnodes", "1").rpartition(":")[2], read.text("nproc-per-node")
    if "nnodes" in read and "nproc-per-node" not in read:
        per_node = str(USUAL_NODE)
        read.notes.append(
            f"The launcher says nodes and not their GPUs, so that each has {per_node}; `--gpus` "
            "gives another number."
        )
    return int(nodes) * int(per_node) if nodes.isdigit() and per_node.isdigit() else 0


def least_gpus(read: Reader, experts: bool) -> int:
    """The number of GPUs of which that of a job is a multiple."""
    tp, pp, cp, ep = (read.count(DEGREES[name], 1) for name in ("tp", "pp", "cp", "ep"))
    of_experts = ep * read.count(DEGREES["etp"], tp) if experts else 1
    return pp * math.lcm(tp * cp, of_experts)


def _layout(read: Reader, num_gpus: int, model: Table) -> Table:
    layout = read.given(**DEGREES)
    tp, pp, cp = (layout.get(name, 1) for name in ("tp", "pp", "cp"))
    if num_gpus % (tp * pp * cp) != 0 and read.sound(*DEGREES.values()):
        read.problems.append(
            f"{plural(num_gpus, 'GPU')}, which tp*pp*cp = {tp}*{pp}*{cp} does not divide"
        )
    layout["dp"] = max(1, num_gpus // (tp * pp * cp))
    of_experts = () if uses_experts(model) else ("ep", "etp")
    return {name: degree for name, degree in layout.items() if name not in of_experts}


def num_layers_of(model: Table) -> int:
    """The number of layers of a model."""
    return model.get("num_layers") or sum(layer.get("repeat", 1) for layer in model["layers"])


def uses_experts(model: Table) -> bool:
    """Whether a model has a mixture of experts."""
    return any("moe" in layer["modules"] for layer in model.get("layers", []))


def _batch(read: Reader, replicas: int) -> int | None:
    """The number of sequences in a step, if the files say it."""
    if "global-batch-size" in read:
        return read.count("global-batch-size")
    return replicas * read.count("num-microbatches") if "num-microbatches" in read else None


def _schedule(read: Reader, model: Table, layout: Table, training: Table) -> Table:
    """The kind of schedule, and how the layers are distributed over its stages."""
    replicas = layout["dp"] * training["microbatch_size"]
    batch = _batch(read, replicas) or replicas
    if batch % replicas != 0 and read.sound(
        "global-batch-size", "micro-batch-size", *DEGREES.values()
    ):
        read.problems.append(
            f"{read.name('global-batch-size')} {batch}, which dp*micro-batch-size = {replicas} "
            "does not divide"
        )
    pp, count = layout.get("pp", 1), num_layers_of(model)
    dealt = _dealt(read, pp, count)
    virtual = len(dealt) // pp if dealt else _virtual_stages(read, pp, count)
    schedule: Table = {
        "kind": _kind(read, layout, virtual),
        "num_microbatches": max(1, batch // replicas),
    }
    if virtual > 1 or "num-virtual-stages-per-pipeline-rank" in read:
        schedule["virtual_stages"] = virtual
    if read.flag("no-overlap-p2p-communication") and pp > 1:
        if virtual > 1:
            read.problems.append("`no-overlap-p2p-communication` with several stages on a rank")
        schedule["blocking"] = True
    group = read.count("microbatch-group-size-per-virtual-pipeline-stage", 0, least=0)
    if group and virtual > 1:
        schedule["microbatch_group_size"] = group
    if dealt and len(set(dealt)) > 1:
        schedule["layers_per_stage"] = dealt
    for end, key in _ENDS.items():
        if read.flag(f"account-for-{end}-in-pipeline-split"):
            schedule[key] = True
    return schedule


def _kind(read: Reader, layout: Table, virtual: int) -> str:
    if read.flag("overlap-moe-expert-parallel-comm") and layout.get("ep", 1) > 1:
        if layout.get("pp", 1) == 1 or virtual > 1:
            return "overlapped-1f1b"
        read.problems.append(
            "`overlap-moe-expert-parallel-comm` on several pipeline ranks of one stage each"
        )
    return "interleaved-1f1b" if virtual > 1 else "1f1b"


def _virtual_stages(read: Reader, pp: int, count: int) -> int:
    layers_per_stage = read.count("num-layers-per-virtual-pipeline-stage", 0, least=0)
    if layers_per_stage:
        ends = sum(read.flag(f"account-for-{end}-in-pipeline-split") for end in _ENDS)
        return max(1, (count + ends) // (pp * layers_per_stage))
    return read.count("num-virtual-stages-per-pipeline-rank", 1)


def _dealt(read: Reader, pp: int, count: int) -> list[int]:
    """The number of layers in each stage, if the arguments give them."""
    text, pattern = read.text("pipeline-model-parallel-layout"), read.text("hybrid-layer-pattern")
    main = pattern.partition("/")[0]
    stages: list[int] = []
    if text:
        try:
            stages = layers_of_layout(text)
        except ValueError as error:
            read.problems.append(f"`pipeline-model-parallel-layout` of {error}")
    elif "|" in main:
        stages = [len(stage) for stage in main.split("|")]
    first = read.count("decoder-first-pipeline-num-layers", 0, least=0)
    last = read.count("decoder-last-pipeline-num-layers", 0, least=0)
    if first or last:
        stages = _uneven(read, pp, count, first, last)
    if stages and (len(stages) % pp or sum(stages) != count):
        read.problems.append(
            f"{plural(len(stages), 'stage')} with {sum(stages)} layers, of {count} on {pp} ranks"
        )
        return []
    return stages


def _uneven(read: Reader, pp: int, count: int, first: int, last: int) -> list[int]:
    """The given numbers of layers for the first and the last rank, and equal ones between them."""
    virtual = _virtual_stages(read, pp, count)
    of_stage = "num-layers-per-virtual-pipeline-stage"
    if of_stage in read:
        virtual = max(1, first // read.count(of_stage)) if first else 1
    between = pp - bool(first) - bool(last)
    num_between = count - first - last
    if pp * virtual > MOST_LAYERS:
        read.problems.append(f"{pp}*{virtual} stages for {count} layers")
        return []
    even = num_between // between if between else 0
    ranks = [first or even, *[even] * (pp - 2), last or even]
    if pp < 2 or num_between != even * between or any(rank % virtual for rank in ranks):
        read.problems.append("uneven stages that do not divide")
        return []
    return [rank // virtual for rank in ranks] * virtual


# A repeated letter or pair of brackets, and how deep these may lie in each other.
_REPEAT = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,6})(?!\d)")
_DEEPEST = 100


def layers_of_layout(text: str) -> list[int]:
    """The number of layers (`t`) in each virtual stage. Stages are separated by `|`, `x*3` and
    `(...)*3` repeat, `E` is the embedding, `L` the loss and `m` a multi-token-prediction layer.

    **Raises:**

    A `ValueError` if it cannot be read, or if the embedding or the loss is not at its end.
    """
    spread = "".join(text.split()).replace(",", "")
    for _ in range(_DEEPEST):
        # Before they are written out, which may take more memory than there is.
        if sum(len(m[1] or m[2] or "") * int(m[3]) for m in _REPEAT.finditer(spread)) > MOST_LAYERS:
            raise ValueError("more layers than any model has")
        spread, repeats = _REPEAT.subn(lambda m: (m[1] or m[2] or "") * int(m[3]), spread)
        if not repeats:
            break
    if "*" in spread:
        raise ValueError("repeats that are no numbers of layers")
    spread = re.sub(r"[()]", "", spread)
    stages = spread.split("|")
    if not re.fullmatch(r"E[t|]*(?:m\|?)*L", spread):
        raise ValueError("a pipeline whose ends are not on its outer stages")
    return [stage.count("t") for stage in stages]


def _training(read: Reader, model: Table) -> Table:
    base = "fp16" if read.flag("fp16") else "bf16"
    dtype, narrow = read.replaced.get("training.dtype", "").strip("\"'"), _dtype(read)
    dtype = "fp32" if dtype == "float32" else dtype
    in_float32 = dtype in ("fp32", "tf32") or not (dtype or read.flag("bf16") or base == "fp16")
    if in_float32:
        base = "fp32"
        if narrow and not dtype:
            read.problems.append(f"products in {narrow} of float32 (neither `bf16` nor `fp16`)")
    read.choice("optimizer", "adam")
    fused = _LOSSES[read.choice("cross-entropy-fusion-impl", *_LOSSES)]
    length = "decoder-seq-length" if has_encoder(read) else "seq-length"
    training: Table = {
        "microbatch_size": _microbatch_size(read),
        "sequence_length": read.count(length, model.get("max_positions", _LONGEST)),
        "dtype": narrow or base,
        "zero": _zero(read),
        "sequence_parallel": read.flag("sequence-parallel"),
        "tp_overlap": read.flag("tp-comm-overlap"),
        "overlap_grad_reduce": read.flag("overlap-grad-reduce"),
        "overlap_param_gather": read.flag("overlap-param-gather"),
        "loss": fused if read.flag("cross-entropy-loss-fusion") else "vocab-parallel",
        **read.given(optimizer_instances="num-distributed-optimizer-instances"),
        **_kernels(read),
        **(_float32(read, dtype) if in_float32 else {}),
    }
    if "cp-comm-type" in read:
        training["cp_comm_type"] = _cp_comm_type(read)
    if "moe-token-dispatcher-type" in read:
        # As in Megatron-Core, `allgather` is for one expert-parallel rank.
        kind = read.choice("moe-token-dispatcher-type", "allgather", "alltoall", "flex")
        backend = read.choice("moe-flex-dispatcher-backend", "deepep", "hybridep")
        training["token_dispatcher"] = backend if kind == "flex" else "alltoall"
    if read.flag("moe-shared-expert-overlap"):
        training["overlap_shared_experts"] = True
    if read.flag("torch-fsdp2-no-reshard-after-forward") and training["zero"] == 3:
        training["reshard_after_forward"] = False
    if bucket := read.count("ddp-bucket-size", 0, least=0):
        training["gradient_bucket_size"] = bucket
    if read.flag("lora"):
        training["adapters"] = {"rank": read.count("lora-rank", 8)}
    return {**training, **_dtypes(read, base, training), **_recompute(read), **_offload(read)}


def _float32(read: Reader, asked: str) -> Table:
    """How training in float32 computes. Products are in TF32 in Transformer Engine and in NVIDIA's
    containers, which set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE; in PyTorch alone they are not, but it
    has a fused kernel of attention for float32 (scaled_dot_product_attention).
    """
    dtype = "fp32" if is_off(read.get("tf32", True)) else "tf32"
    attention = read.text("attention-in-float32", "unfused")
    why = "as asked" if asked else "neither `bf16` nor `fp16`"
    read.notes.append(
        f"Training is in float32 ({why}): products in {asked or dtype}, and attention "
        f"{'unfused, as ' if attention == 'unfused' else 'by a kernel of PyTorch, as '}"
        "FlashAttention takes 16 bits; `--set training.dtype=bf16` gives another."
    )
    return {"dtype": dtype, "attention": attention}


def _microbatch_size(read: Reader) -> int:
    if "micro-batch-size" not in read:
        read.notes.append(
            f"The microbatch is not said ({read.name('micro-batch-size')}), so it is one sequence; "
            "`--set training.microbatch_size=N` gives another."
        )
    return read.count("micro-batch-size", 1)


def _dtypes(read: Reader, base: str, training: Table) -> Table:
    """The dtypes of gradients, of the optimizer's moments and of what is gathered."""
    in_float32 = not read.flag("grad-reduce-in-bf16")
    if base == "fp16":
        in_float32 = read.flag("accumulate-allreduce-grads-in-fp32")
    main = {read.choice(name, "fp32", "auto", base) for name in _MAIN_GRADIENTS}
    dtypes = {"gradient_dtype": "fp32" if in_float32 and base not in main else base}
    sent = read.choice("megatron-fsdp-grad-comm-dtype", "auto", *_DTYPES)
    if sent != "auto":
        dtypes["gradient_comm_dtype"] = sent
    moments = [read.choice(f"exp-avg{which}-dtype", *_DTYPES) for which in ("", "-sq")]
    if len({*moments}) > 1:
        read.problems.append(f"moments in {' and '.join(moments)}")
    if "exp-avg-dtype" in read or "exp-avg-sq-dtype" in read:
        dtypes["optimizer_dtype"] = moments[0]
    # What is scaled by blocks is gathered in 16 bits: a shard has parts of blocks. With PyTorch's
    # FSDP, Megatron-LM switches it off.
    gathers = read.flag("fp8-param-gather") and not read.flag("use-torch-fsdp2")
    if gathers and training["dtype"] == "fp8":
        dtypes["gather_dtype"] = "fp8"
    return dtypes


def _kernels(read: Reader) -> Table:
    """How kernels run: attention, in fp8, and from CUDA graphs."""
    kernels: Table = {
        key: True for key, names in _IN_FP8.items() if any(read.flag(name) for name in names)
    }
    backend, local = read.text("attention-backend", "auto"), read.text("transformer-impl")
    if read.flag("use-flash-attn") or backend in ("flash", "fused"):
        kernels["attention"] = "flash"
    elif backend in ("unfused", "local") or local == "local":
        kernels["attention"] = "unfused"
    implementation = read.choice("cuda-graph-impl", "none", "local", "transformer_engine")
    older = [read.flag("enable-cuda-graph"), read.flag("external-cuda-graph")]
    if implementation != "none" or any(older):
        is_whole = "full_iteration" in read.text("cuda-graph-scope")
        kernels["cuda_graphs"] = "iteration" if is_whole else "modules"
    elif "cuda-graph-impl" in read:
        kernels["cuda_graphs"] = "none"
    return kernels


def _dtype(read: Reader) -> str | None:
    """The dtype of matrix multiplications, if it has fewer than 16 bits."""
    recipe = read.choice("fp8-recipe", "delayed", "tensorwise", "blockwise", "mxfp8")
    # A flag and its older name, both of which are read.
    fp8, fp4 = ([not is_off(read.get(k)) for k in (f"{w}-format", w)] for w in ("fp8", "fp4"))
    if any(fp4):
        return "fp4"
    if not any(fp8):
        return None
    return "mxfp8" if recipe == "mxfp8" else "fp8"


def _cp_comm_type(read: Reader) -> str:
    """The `cp_comm_type` of all layers; without context parallelism it does not matter."""
    kinds = set(read.text("cp-comm-type", "p2p").strip("[]").replace(",", " ").split())
    kind = " ".join(sorted(kinds)).replace("allgather", "all_gather")
    if kind in ("p2p", "all_gather", "a2a"):
        return kind
    if read.count("context-parallel-size", 1) > 1:
        read.problems.append(f"`cp-comm-type` {quoted(kind)}")
    return "p2p"


def _zero(read: Reader) -> int:
    """What is sharded: with Megatron's own FSDP as its strategy says, with PyTorch's FSDP all."""
    zero = int(read.flag("use-distributed-optimizer"))
    if read.flag("use-torch-fsdp2"):
        return 3
    if not read.flag("use-megatron-fsdp"):
        return zero
    read.choice("outer-dp-sharding-strategy", "no_shard")
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    return strategies.index(read.choice("data-parallel-sharding-strategy", *strategies))


def _offload(read: Reader) -> Table:
    """What is kept in the memory of the host. Without a number of layers, no activations are."""
    layers = read.count("cpu-offloading-num-layers", 0, least=0)
    layers *= not is_off(read.get("cpu-offloading-activations", True))
    share = read.flag("optimizer-cpu-offload") * read.rate("optimizer-offload-fraction", 1.0)
    offload = ["activations"] * (layers > 0) + ["optimizer"] * (share > 0)
    keys: Table = {"offload": offload} if offload else {}
    keys |= {"offload_layers": layers} if layers else {}
    return keys | ({"offload_fraction": share} if 0 < share < 1 else {})


def _recompute(read: Reader) -> Table:
    granularity = read.choice("recompute-granularity", "none", "selective", "full")
    if read.flag("recompute-activations"):
        granularity = "selective"
    modules = read.text("recompute-modules").strip("[]").replace(",", " ").split()
    if read.flag("moe-layer-recompute"):  # An older name of it (transformer_config.py).
        modules = [*(modules or ["core_attn"] * (granularity == "selective")), "moe"]
        granularity = "selective" if granularity == "none" else granularity
    method = read.text("recompute-method")
    number = read.count("recompute-num-layers", 1, least=0)
    layers = {"recompute_layers": number} if number and "recompute-num-layers" in read else {}
    granularity = granularity if number else "none"
    keys: Table = {}
    if granularity != "none" or "recompute-granularity" in read:
        keys["recompute"] = granularity
    if granularity == "selective" and modules:
        keys["recompute_modules"] = [*dict.fromkeys(modules)]
    if granularity == "full":
        keys |= layers | ({"recompute_method": method} if method else {})
    return keys
