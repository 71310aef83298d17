"""Makes a job from the arguments of Megatron-LM."""

from collections.abc import Mapping

from .._misc import quoted
from ._megatron_flags import check_flags, usual_names
from ._megatron_model import has_encoder, model_of
from ._megatron_schedule import layout_of, schedule_of
from ._problems import InexpressibleError, Reader, Table, is_off


_IN_FP8 = {
    "fp8_attention": ("fp8-dot-product-attention", "fp8-multi-head-attention"),
    "fp8_head": ("fp8-output-proj",),
}


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
    model = model_of(read)
    layout = layout_of(read, num_gpus)
    training = _training(read, model)
    schedule = schedule_of(read, model, layout, training)
    check_flags(read, training["dtype"])
    if read.problems:
        raise InexpressibleError(where, read.problems)
    return {"model": model, "layout": layout, "schedule": schedule, "training": training}


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
    training |= _kernels(read)
    if read.flag("moe-shared-expert-overlap"):
        training["overlap_shared_experts"] = True
    if read.flag("torch-fsdp2-no-reshard-after-forward") and training["zero"] == 3:
        training["reshard_after_forward"] = False
    if "ddp-bucket-size" in read:
        training["gradient_bucket_size"] = read.count("ddp-bucket-size")
    return {**training, **_recompute(read)}


def _kernels(read: Reader) -> Table:
    """How kernels run: in fp8, and from CUDA graphs."""
    found: Table = {
        key: True for key, names in _IN_FP8.items() if any(read.flag(name) for name in names)
    }
    implementation = read.choice("cuda-graph-impl", "none", ("none", "local", "transformer_engine"))
    older = [read.flag("enable-cuda-graph"), read.flag("external-cuda-graph")]
    if implementation != "none" or any(older):
        is_whole = "full_iteration" in read.text("cuda-graph-scope")
        found["cuda_graphs"] = "iteration" if is_whole else "modules"
    return found


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
