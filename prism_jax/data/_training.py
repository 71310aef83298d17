"""How a step of a job is computed, and software stacks, which are defaults of it: what each
overlaps and fuses.
"""

import os
import pathlib
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from .._files import shown
from .._misc import quoted
from ._finetuning import Adapters, Packed
from ._read import find_file, read_toml
from ._types import Count, FileName, Fraction, Label, NonNegative, Text, convert


# Keys that belong to the job itself, so no software stack may set them.
_OF_A_JOB = (
    *("microbatch_size", "sequence_length", "global_batch_size"),
    *("dtype", "software", "adapters", "packed"),
)


RecomputedModule: TypeAlias = Literal[
    "core_attn",
    "layernorm",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "mla_up_proj",
    "fused_attn",
]


_Eager: TypeAlias = Literal["eager", "eager-named", "eager-float32"]
_Split: TypeAlias = Literal["vocab-parallel", "vocab-parallel-compiled"]
Loss: TypeAlias = Literal[_Eager, _Split, "compiled", "fused"]


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is computed.

    **Attributes:**

    - `microbatch_size`: the number of sequences in a microbatch.
    - `sequence_length`: the number of tokens in a sequence.
    - `global_batch_size`: the number of sequences in a step, of all replicas; where
        `schedule.num_microbatches` is left out, it follows from it.
    - `dtype`: the dtype of the matrix multiplications of layers. `mxfp8` and `fp4` have a scaling
        factor for each 32 and 16 values. With these and with `fp8`, everything else is in `bf16`.
        `fp32` and `tf32` are training in float32, parameters included, of which there is no copy:
        with `tf32` tensor cores multiply, as with PyTorch's `allow_tf32`, in Transformer Engine and
        in NVIDIA's containers.
    - `recompute`: what the backward recomputes: nothing (`none`), the modules of
        `recompute_modules` (`selective`), all of a layer but the results of every other matrix
        product, of fused attention, and of its reduce_scatters and all_to_alls (`by-op`, which
        torchtitan calls `selective`), or whole layers (`full`).
    - `recompute_modules`: which modules are recomputed with `selective`, as in Megatron-LM:
        `core_attn`, `layernorm`, `mlp`, `moe`, `moe_act`, `shared_experts`, `mla_up_proj`; or
        `fused_attn`, the fused kernel of attention, as with policies of JAX that keep the results
        of products alone.
    - `recompute_method`: how whole layers are recomputed: `uniform` keeps the input of every
        `recompute_layers` layers, `block` recomputes the first `recompute_layers` layers of each
        stage.
    - `recompute_layers`: the number of layers for `recompute_method`.
    - `recompute_early_stop`: whether the recomputation of a layer ends once all that its backward
        needs is there, as in PyTorch without reentry: the last matrix of an MLP is not recomputed.
    - `offload`: what is kept in the memory of the host: `activations`, which are copied there
        beside the forward and back beside the backward, or the states of the `optimizer`, which the
        host then updates. The device needs a `host`.
    - `offload_layers`: of how many layers of a stage the activations are offloaded; by default of
        all. Their copies are spread over all layers, as in Transformer Engine.
    - `offload_fraction`: which share of the optimizer's states is offloaded.
    - `optimizer`: `adam`, for gradients that are clipped by the norm of all of them, or `adagrad`,
        with one moment instead of two, for gradients as they are.
    - `zero`: what is sharded over the replicas: nothing (0); the optimizer (1); gradients too,
        which each microbatch reduce-scatters (2); parameters too, which each microbatch gathers
        layer by layer (3, known as FSDP).
    - `accumulate_gradients`: whether, with sharded gradients, a stage accumulates the gradients of
        consecutive microbatches, unsharded, and reduce-scatters the sum after the last of these,
        overlapped with what follows. Otherwise each microbatch reduce-scatters its own gradients.
    - `no_sync`: whether, with gradients that are not sharded, only the last microbatch reduces
        their sum, as within PyTorch's `no_sync`; otherwise each microbatch does.
    - `reshard_after_forward`: whether gathered parameters are freed after a forward; otherwise they
        are kept for the backward.
    - `prefetch`: how many layers ahead parameters are gathered, overlapped with compute. Each takes
        memory. With 0 the gathers are exposed; with more than one, the step is no faster than with
        one.
    - `gather_copy_bytes`, `gradient_copy_bytes`: the bytes that are moved, besides what is sent,
        for each parameter that is gathered, and for each gradient before it is reduced: FSDP
        copies, casts and divides whole layers.
    - `optimizer_instances`: how many copies there are of everything that is sharded. Each copy is
        sharded over equally many neighbouring replicas, and the copies all-reduce the gradients of
        their shards (with FSDP, this is hybrid sharding).
    - `attention`: the attention kernel: fused, where `flash` is that of a device's main
        table, `flash-1` and `flash-2` are FlashAttention 1 and 2, and `cudnn` is cuDNN's kernel of
        2025 and 2026 where it differs, on Blackwell, which it stands for FlashAttention 2 as well;
        or `unfused`, as separate kernels. FlashAttention and cuDNN take no float32, for which
        `flash` is PyTorch's own fused kernel; Transformer Engine has `unfused`.
    - `sequence_parallel`: whether norms and dropouts are split over the tensor-parallel group.
    - `scatter_send_recv`: whether, without `sequence_parallel`, each GPU of a tensor-parallel group
        sends only a part of a tensor to another pipeline rank, where the parts are gathered (the
        scatter/gather optimization of Narayanan et al. 2021, arXiv:2104.04473, section 4.1).
        Otherwise each GPU sends the whole tensor. With `sequence_parallel` each GPU has only a
        part, and this has no effect.
    - `cp_comm_type`: how attention in a context-parallel group gets the keys and values of other
        ranks, in the terms of Megatron-LM: around a ring (`p2p`), by gathering them (`all_gather`),
        or by exchanging tokens for heads (`a2a`).
    - `cp_load_balance`: whether each rank of a context-parallel group has an early and a late part
        of a sequence, so that a causal mask leaves all ranks equal work; otherwise the last rank
        has the most.
    - `tp_overlap`: whether tensor-parallel collectives run in pieces that overlap with their matrix
        multiplications.
    - `overlap_tp_backward`: whether the tensor-parallel collectives of a backward overlap with its
        matrix multiplications, as in Megatron-LM since 2022. In software of 2021 they do not.
    - `overlap_grad_reduce`: whether gradient reductions overlap with the backward, including those
        of gradients that each microbatch reduce-scatters.
    - `overlap_param_gather`: whether parameter gathers overlap with the forward.
    - `gather_in_turn`: whether, with `zero` 1 and 2, each GPU broadcasts the parameters that it has
        updated, one after the other, instead of all of them in one all_gather.
    - `token_dispatcher`: how tokens are sent to experts: `alltoall` sends a copy to each of a
        token's experts; `deepep` and `hybridep`, the two backends of Megatron-Core's flex
        dispatcher, send one copy to each node and each rank that has any of them, and permute
        tokens only where they arrive.
    - `overlap_shared_experts`: whether the shared experts overlap with the exchanges for the other
        experts, as with Megatron-Core's `moe-shared-expert-overlap`.
    - `gradient_bucket_size`: the fewest parameters of the first stage whose gradients are reduced
        together, if reductions overlap with the backward; by default 40 million or, if it is more,
        one million for each replica. Other stages reduce all of their gradients at once.
    - `gradient_dtype`: the dtype in which gradients are accumulated and, unless
        `gradient_comm_dtype` is another, reduced.
    - `gradient_comm_dtype`: the dtype in which gradients are sent to other replicas; by default
        `gradient_dtype`.
    - `gather_dtype`: the dtype in which parameters are gathered; by default that of activations.
        With `fp8` this holds for the matrices of layers, not for the ends of the model.
    - `optimizer_dtype`: the dtype of the optimizer's moments.
    - `loss`: how the cross entropy treats logits, by what it holds for each at its peak, in bytes:
        `eager`, PyTorch's own for logits in float32 (12; 16 where the vocabulary is split, as by
        DTensor), where a name keeps the 16-bit logits (`eager-named`: 14) or the float32 ones too
        (`eager-float32`: 18); `vocab-parallel`, Megatron-LM's, in place (6), or by kernels that are
        compiled, not in place (`vocab-parallel-compiled`: 12); `compiled`, with nothing but 16-bit
        logits and their gradients (4); `fused`, whose gradients take the place of the logits, as
        those of Transformer Engine and Liger (2). By default `eager` with FSDP (`zero = 3`), else
        `vocab-parallel`.
    - `loss_chunks`: in how many pieces the tokens of a microbatch go through the head and the loss,
        one after the other, so that only the logits of one piece are there at a time.
    - `narrow_inputs`: whether the inputs of products in fp8 or narrower are kept for the backward
        as they were multiplied, as Transformer Engine does; otherwise in 16 bits.
    - `scaling`: of which values the scales of narrow dtypes are: of those of earlier steps
        (`delayed`), or of the `tensor` or each `row` that is cast. Then a kernel reads them for
        their maximum before another casts them, and again for the transpose.
    - `eager_share`: the share of the bandwidth of fused kernels that norms and elementwise kernels
        of a layer reach, where the framework runs each op as a kernel of its own.
    - `separate_products`: whether the matrices of queries, keys and values, those of a gate and of
        what it scales, and latents, are multiplied one by one, not as one matrix.
    - `rotary_bytes`: the bytes that rotary positions move for each value of queries and keys: 4 in
        one kernel; 20 as complex numbers in float32, to which kernels of their own cast, which
        multiply, and cast back, as in torchtitan's Llama (torch.compile makes no code for these).
    - `launch_floor_s`: the shortest time of a compute kernel, because the host takes this long to
        launch one, unless a CUDA graph replays the whole step.
    - `host_module_s`, `host_experts_s`: how long the host takes to launch the kernels of a module
        of a layer, and those of a mixture of experts, in a forward or a backward. A layer takes at
        least as long as the launches of its modules.
    - `operators`: the kernels of each operator of a framework that does not fuse them: a file of
        `kernels/operators/`, or a path; by default kernels are fused, as they are of float32.
        Its libraries choose the kernels of the device (`kernels/DEVICE-YEAR`).
    - `weights`: how PyTorch keeps parameters: in float32, which autocast casts for each forward
        (`fp32`), or in 16 bits, with gradients and moments in 16 bits (`bf16`), which are also sent
        and gathered so, whatever `gradient_dtype` and `gather_dtype` are; other software has
        parameters in 16 bits, and copies in float32 that the optimizer updates (`copied`); FSDP has
        shards in float32 alone.
    - `optimizer_kernels`: how PyTorch's optimizer updates parameters: in one kernel for many
        (`fused`), op by op for many (`foreach`), or op by op for each (`loop`), with `operators`.
    - `host_forward_s`, `host_backward_s`: how long the host takes to launch a kernel of a forward
        and of a backward, in seconds, with `operators`. The device waits where the host is behind,
        and the host waits for the device once before each forward.
    - `cuda_graphs`: what CUDA graphs replay, so that the host need not launch it: nothing (`none`),
        the modules of layers and half of a mixture of experts (`modules`: all that does not depend
        on the counts of tokens), or the whole step (`iteration`).
    - `fused_experts`: whether the grouped matrix multiplications of experts apply the activation,
        the biases and the casts to fp8 or narrower themselves.
    - `fp8_attention`, `fp8_head`: whether fused attention, and the head, multiply in fp8 or
        narrower, if layers do.
    - `forward_only`: whether a step has forwards alone, as for an evaluation or the prefill of
        inference; there are then no gradients and no optimizer.
    - `adapters`: the adapters of low rank (LoRA) that are trained instead of the model; all of it
        without.
    - `packed`: the law of the lengths of the sequences that are packed into one of
        `sequence_length`; without, each is a single one.
    - `software`: the software stack that gives the defaults of keys of `training` that the job's
        file does not set: the name of a shipped one, or the path of a file. It is read when a job
        is loaded; in Python, a `Training` has the values that it was made with.
    """

    microbatch_size: Count
    sequence_length: Count
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4"] = "bf16"
    recompute: Literal["none", "selective", "by-op", "full"] = "none"
    recompute_modules: tuple[RecomputedModule, ...] = ("core_attn",)
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_layers: Count = 1
    recompute_early_stop: bool = False
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    offload_layers: Count | None = None
    offload_fraction: Fraction = 1.0
    optimizer: Literal["adam", "adagrad"] = "adam"
    zero: Literal[0, 1, 2, 3] = 1
    accumulate_gradients: bool = False
    no_sync: bool = True
    reshard_after_forward: bool = True
    prefetch: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    gather_copy_bytes: NonNegative = 0.0
    gradient_copy_bytes: NonNegative = 0.0
    optimizer_instances: Count = 1
    attention: Literal["flash", "flash-1", "flash-2", "cudnn", "unfused"] = "flash"
    sequence_parallel: bool = True
    scatter_send_recv: bool = False
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    cp_load_balance: bool = True
    tp_overlap: bool = False
    overlap_tp_backward: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    gather_in_turn: bool = False
    token_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    overlap_shared_experts: bool = False
    gradient_bucket_size: Count | None = None
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_comm_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    gather_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    optimizer_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    loss: Loss | None = None
    loss_chunks: Count = 1
    narrow_inputs: bool = False
    scaling: Literal["delayed", "tensor", "row"] = "delayed"
    eager_share: Annotated[float, msgspec.Meta(ge=0.01, le=1)] = 1.0
    separate_products: bool = False
    rotary_bytes: NonNegative = 4.0
    launch_floor_s: NonNegative = 0.0
    host_module_s: NonNegative = 0.0
    host_experts_s: NonNegative = 0.0
    operators: FileName | None = None
    weights: Literal["fp32", "bf16", "copied"] = "copied"
    optimizer_kernels: Literal["fused", "foreach", "loop"] = "fused"
    host_forward_s: Annotated[float, msgspec.Meta(ge=0, le=0.01)] = 0.0
    host_backward_s: Annotated[float, msgspec.Meta(ge=0, le=0.01)] = 0.0
    cuda_graphs: Literal["none", "modules", "iteration"] = "none"
    fused_experts: bool = False
    fp8_attention: bool = False
    fp8_head: bool = False
    forward_only: bool = False
    adapters: Adapters | None = None
    packed: Packed | None = None
    global_batch_size: Count | None = None
    software: FileName | None = None

    @property
    def plain(self) -> bool:
        """Whether parameters have no copies, and gradients and moments are of their dtype."""
        return self.weights in ("fp32", "bf16")

    @property
    def base_dtype(self) -> str:
        """The dtype of activations, and of whatever is not multiplied in a narrower dtype."""
        return "bf16" if self.dtype in ("fp8", "mxfp8", "fp4") else self.dtype

    @property
    def in_float32(self) -> bool:
        """Whether parameters, activations and their gradients are in float32."""
        return self.dtype in ("fp32", "tf32")

    @property
    def listed(self) -> bool:
        """Whether the kernels of `operators` are listed for such a training."""
        return self.dtype in ("bf16", "fp16")


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A software stack.

    **Attributes:**

    - `source`: where its settings are from.
    - `training`: keys of `Training` with the values that the stack sets.
    - `selective`: what the stack calls selective recomputation, as a value of `recompute`.
    - `nearest_to`: the classes of jobs without a stack to which it is the nearest that is shipped:
        `dense`, `experts` or `tables`, with `FSDP` or `no FSDP`, and the generation of the device.
    - `name`: the name of the stack.
    """

    source: Text
    training: dict[str, Any]
    selective: Literal["selective", "by-op"] = "selective"
    nearest_to: tuple[Text, ...] = ()
    name: Label = ""


def load_software(name: str | os.PathLike[str], given_by: pathlib.Path | None = None) -> Software:
    """Loads a software stack by its name, if it is shipped, or by the path of a file.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("software stack", name, given_by)
    raw = read_toml(path, "software")
    raw.setdefault("name", quoted(path.stem))
    software = convert(raw, Software, lambda key: shown(path))
    convert({"training": software.training}, _Switches, lambda key: shown(path))
    return software


_KEYS = [
    (field.name, field.type, field.default)
    for field in msgspec.structs.fields(Training)
    if field.name not in _OF_A_JOB
]
_Switches = msgspec.defstruct("_Switches", [("training", msgspec.defstruct("_Training", _KEYS))])
