"""Makes a job from the arguments of Megatron-LM."""

from collections.abc import Mapping

from .._misc import quoted
from ._megatron_flags import check_flags, tables, usual_names
from ._megatron_kernels import kernels_of
from ._megatron_layers import (
    encoder_and_decoder,
    has_encoder,
    is_encoder,
    layers_of,
    window_of,
)
from ._megatron_schedule import schedule_of
from ._problems import InexpressibleError, Reader, Table, is_off


def from_megatron(arguments: Mapping[str, object], num_gpus: int, where: str) -> Table:
    """The tables `model`, `layout`, `schedule` and `training` of a job. Flags that are not known
    are left out.

    **Arguments:**

    - `arguments`: each flag without its dashes, with its value.
    - `num_gpus`: the number of GPUs of the job.
    - `where`: the origin of the arguments, for messages.

    **Raises:**

    `InexpressibleError` with everything that a job cannot express.
    """
    return read_megatron(megatron_reader(arguments), num_gpus, where)


def megatron_reader(arguments: Mapping[str, object], *, strict: bool = False) -> Reader:
    """Reads flags by their usual names; see `Reader` for `strict`."""
    return Reader(usual_names(arguments), strict=strict)


def read_megatron(read: Reader, num_gpus: int, where: str) -> Table:
    """As `from_megatron`, with notes in `read`."""
    model = _model(read)
    layout = _layout(read, num_gpus)
    training = _training(read, model)
    schedule = schedule_of(read, model, layout, training)
    check_flags(read, training["dtype"])
    if read.problems:
        raise InexpressibleError(where, read.problems)
    return {"model": model, "layout": layout, "schedule": schedule, "training": training}


def _model(read: Reader) -> Table:
    hidden = read.count("hidden-size")
    swiglu, heads = read.flag("swiglu"), read.count("num-attention-heads")
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
    activation = "squared_relu" if read.flag("squared-relu") else "swiglu" if swiglu else "gelu"
    activation = "geglu" if read.flag("quick-geglu") else activation
    if "kv-channels" not in read and hidden % heads != 0:
        read.problems.append(
            f"`num-attention-heads` {heads} does not divide `hidden-size` {hidden}"
        )
    groups = read.count("num-query-groups", 1)
    dropout = [read.rate(f"{what}-dropout", 0.1) for what in ("hidden", "attention")]
    norm = read.choice("normalization", "LayerNorm", ("LayerNorm", "RMSNorm"))
    model = {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": groups if read.flag("group-query-attention") else heads,
        "head_size": read.count("kv-channels", max(1, hidden // heads)),
        "ffn_size": read.count("ffn-hidden-size", ffn),
        "vocab_size": _vocabulary(read),
        "activation": activation,
        "position": _position(read),
        "max_positions": read.count("max-position-embeddings"),
        "norm": norm.lower(),
        "bias": not read.flag("disable-bias-linear"),
        "tied_embeddings": not read.flag("untie-embeddings-and-output-weights"),
        "dropout": any(dropout),
    }
    modules: Table = {"attention": {"kind": "attention"}}
    if is_encoder(read):
        modules["attention"]["causal"] = False
        model["head_transforms"] = 1 if read.flag("bert-no-binary-head") else 2
    modules["attention"]["qk_norm"] = read.flag("qk-layernorm")
    modules["attention"]["qkv_bias"] = read.flag("add-qkv-bias")
    attention = "attention"
    if "window-size" in read:
        window = window_of(read)
        modules["local"] = modules["attention"] | {"window": window} if window else {}
    if read.flag("multi-latent-attention"):
        attention = "mla"
        modules["mla"] = _mla(read)
    if "num-experts" in read:
        modules["moe"] = _moe(read, model)
    layers, mtp = layers_of(read, attention, windowed=bool(modules.get("local")))
    if has_encoder(read):
        layers, added = encoder_and_decoder(read)
        modules |= added
    names = {name for layer in layers for name in layer["modules"]}
    if "mamba" in names:
        modules["mamba"] = _mamba(read, hidden)
    if "moe" in names and "moe" not in modules:
        read.problems.append("layers of experts without `num-experts`")
    if mtp:
        model["num_mtp_layers"] = mtp
    kept = {name: modules[name] for name in sorted(names) if name in modules}
    return {**model, "layers": layers, "modules": kept}


def _position(read: Reader) -> str:
    known = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
    known |= {"yarn": "rotary", "mrope": "rotary"}
    named = known[read.choice("position-embedding-type", "learned_absolute", known)]
    if read.flag("no-position-embedding") and named == "learned":
        named = "none"
    return "rotary" if read.flag("use-rotary-position-embeddings") else named


def _vocabulary(read: Reader) -> int:
    """The vocabulary size, padded as in Megatron-LM to a multiple for each tensor-parallel rank."""
    multiple = read.count("make-vocab-size-divisible-by", 128)
    multiple *= read.count("tensor-model-parallel-size", 1)
    names = f"{read.text('tokenizer-model')} {read.text('vocab-file')}"
    kind, extra = read.text("tokenizer-type"), read.count("vocab-extra-ids", 0, least=0)
    known = _size_of_words("by_file", names)[1]
    padded, size = (read.count(f"{p}vocab-size", 0, least=0) for p in ("padded-", ""))
    if padded:
        return padded
    if not size and not known:
        of, known = _size_of_words("usual", f"{names.lower()} {kind} HuggingFaceTokenizer")
        read.notes.append(
            f"The size of the vocabulary is not said, so {known:,} words are taken, as is usual "
            f"for `{of}`: give `--vocab-size` for others."
        )
    return -(-(size or known + extra) // multiple) * multiple


def _size_of_words(table: str, text: str) -> tuple[str, int]:
    """The first name of a table of vocabularies that is in a text, and its size; or nothing."""
    known = tables()["vocabularies"][table].items()
    return next(((name, size) for name, size in known if name in text), ("", 0))


def _mla(read: Reader) -> Table:
    table = {"kv_lora_rank": read.count("kv-lora-rank", 32)}
    if "q-lora-rank" in read:
        table["q_lora_rank"] = read.count("q-lora-rank")
    table["qk_head_size"] = read.count("qk-head-dim", 128)
    table["qk_rope_head_size"] = read.count("qk-pos-emb-head-dim", 64)
    table["value_head_size"] = read.count("v-head-dim", 128)
    return table


def _moe(read: Reader, model: Table) -> Table:
    table = {
        "num_experts": read.count("num-experts"),
        "top_k": read.count("moe-router-topk", 2),
        "expert_ffn_size": read.count("moe-ffn-hidden-size", model["ffn_size"]),
    }
    groups = read.count("moe-router-num-groups", 1)
    chosen = read.count("moe-router-group-topk", groups)  # Without effect in a single group.
    if groups > 1:
        table |= {"num_groups": groups, "top_k_groups": chosen}
    shared = read.count("moe-shared-expert-intermediate-size", 0, least=0)
    gate = {"shared_gate": True} if read.flag("moe-shared-expert-gate") else {}
    return {**table, "shared_ffn_size": shared, **gate} if shared else table


def _mamba(read: Reader, hidden: int) -> Table:
    size = read.count("mamba-head-dim", 64)
    return {
        "mamba_num_heads": read.count("mamba-num-heads", max(1, 2 * hidden // size)),
        "mamba_head_size": size,
        "state_size": read.count("mamba-state-dim", 128),
        "num_groups": read.count("mamba-num-groups", 8),
    }


def _layout(read: Reader, num_gpus: int) -> Table:
    tp = read.count("tensor-model-parallel-size", 1)
    pp = read.count("pipeline-model-parallel-size", 1)
    cp = read.count("context-parallel-size", 1)
    layout = {"tp": tp, "pp": pp, "cp": cp, "ep": read.count("expert-model-parallel-size", 1)}
    if "expert-tensor-parallel-size" in read:
        layout["etp"] = read.count("expert-tensor-parallel-size")
    if num_gpus % (tp * pp * cp) != 0:
        read.problems.append(f"{num_gpus} GPUs, which tp*pp*cp = {tp}*{pp}*{cp} does not divide")
    layout["dp"] = max(1, num_gpus // (tp * pp * cp))
    if "num-experts" not in read:
        layout["ep"] = 1
        layout.pop("etp", None)
    return layout


def _training(read: Reader, model: Table) -> Table:
    half = "fp16" if read.flag("fp16") else "bf16"
    if not (read.flag("bf16") or half == "fp16"):
        read.problems.append("training in float32 (neither `bf16` nor `fp16`)")
    read.choice("optimizer", "adam", ("adam",))
    backend, local = read.text("attention-backend", "auto"), read.text("transformer-impl")
    unfused = backend in ("unfused", "local") or (local == "local" and backend == "auto")
    if read.flag("use-flash-attn"):
        unfused = False
    in_float32 = not read.flag("grad-reduce-in-bf16")
    if half == "fp16":
        in_float32 = read.flag("accumulate-allreduce-grads-in-fp32")
    training: Table = {
        "microbatch_size": read.count("micro-batch-size"),
        "sequence_length": read.count(
            "decoder-seq-length" if has_encoder(read) else "seq-length", model["max_positions"]
        ),
        "dtype": _dtype(read) or half,
        "zero": _zero(read),
        "optimizer_instances": read.count("num-distributed-optimizer-instances", 1),
        "attention": "unfused" if unfused else "flash",
        "cp_comm_type": _cp_comm_type(read),
        "sequence_parallel": read.flag("sequence-parallel"),
        "tp_overlap": read.flag("tp-comm-overlap"),
        "overlap_grad_reduce": read.flag("overlap-grad-reduce"),
        "overlap_param_gather": read.flag("overlap-param-gather"),
        "gradient_dtype": "fp32" if in_float32 else half,
        "software": "megatron-core-2024",  # What the host needs to launch kernels.
    }
    # As in Megatron-Core, `allgather` is for one expert-parallel rank.
    kinds = ("allgather", "alltoall", "flex")
    if read.choice("moe-token-dispatcher-type", "allgather", kinds) == "flex":
        backends = ("deepep", "hybridep")
        training["token_dispatcher"] = read.choice(
            "moe-flex-dispatcher-backend", backends[0], backends
        )
    training |= kernels_of(read)
    if read.flag("moe-shared-expert-overlap"):
        training["overlap_shared_experts"] = True
    if read.flag("torch-fsdp2-no-reshard-after-forward") and training["zero"] == 3:
        training["reshard_after_forward"] = False
    if "ddp-bucket-size" in read:
        training["gradient_bucket_size"] = read.count("ddp-bucket-size")
    return {**training, **_recompute(read)}


def _dtype(read: Reader) -> str | None:
    """The dtype of matrix multiplications, if it has fewer than 16 bits."""
    recipes = ("delayed", "tensorwise", "blockwise", "mxfp8")
    recipe = read.choice("fp8-recipe", recipes[0], recipes)
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
    read.choice("outer-dp-sharding-strategy", "no_shard", ("no_shard",))
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    strategy = read.choice("data-parallel-sharding-strategy", strategies[0], strategies)
    return strategies.index(strategy)


def _recompute(read: Reader) -> Table:
    granularity = read.choice("recompute-granularity", "none", ("none", "selective", "full"))
    if read.flag("recompute-activations"):
        granularity = "selective"
    found: Table = {"recompute": granularity}
    modules = read.text("recompute-modules", "core_attn").strip("[]").replace(",", " ").split()
    method, number = read.text("recompute-method", "uniform"), read.count("recompute-num-layers", 1)
    if granularity == "selective":
        found["recompute_modules"] = [*dict.fromkeys(modules)]
    if granularity == "full":
        found |= {"recompute_method": method, "recompute_layers": number}
    return found
