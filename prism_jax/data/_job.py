"""Jobs: what is trained, how it is laid out, on what, and what was measured."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from .._summary import Summary
from ._calibrated import Calibrated
from ._hardware import Cluster
from ._kernels import Kernels
from ._model import Model
from ._types import Count, Label, Name, NonNegative, Positive, Text


RecomputedModule: TypeAlias = Literal[
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"
]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The degrees of parallelism: tensor, pipeline, data, context and expert.

    The ranks of a stage, `tp * cp * dp`, are grouped anew for experts: into expert-parallel groups
    of `ep * etp`, and replicas of these.

    **Attributes:**

    - `tp`: tensor-parallel GPUs, that share each matrix.
    - `pp`: pipeline-parallel ranks.
    - `dp`: data-parallel replicas.
    - `cp`: context-parallel GPUs, that share each sequence.
    - `ep`: expert-parallel GPUs, that share the experts of a layer.
    - `etp`: tensor-parallel GPUs of an expert; by default `tp`.
    """

    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


class ScheduleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline schedule, and how layers are distributed over its stages.

    **Attributes:**

    - `kind`: the schedule's name; `traced` for one that is read off a trace.
    - `num_microbatches`: of one replica in one step.
    - `virtual_stages`: per rank.
    - `microbatch_group_size`: of interleaved schedules; by default the number of ranks.
    - `memory_limit`: of schedules that are made for one: the most microbatches of stages whose
        activations a rank may hold.
    - `orders`: of `traced`: for each rank its ops in the order in which it runs them, as the tokens
        of [`prism_jax.CustomSchedule`][] with a blank between two.
    - `blocking`: whether sends and receives stop compute; `None` leaves it to the schedule.
    - `layers_per_stage`: of each global virtual stage.
    - `embedding_counts_as_layer`, `head_counts_as_layer`: Megatron's way to even out the ends.
    """

    kind: Name
    num_microbatches: Count
    virtual_stages: Count = 1
    microbatch_group_size: Count | None = None
    memory_limit: Count | None = None
    orders: tuple[Text, ...] | None = None
    blocking: bool | None = None
    layers_per_stage: tuple[Annotated[int, msgspec.Meta(ge=0, le=10**5)], ...] | None = None
    embedding_counts_as_layer: bool = False
    head_counts_as_layer: bool = False


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is computed.

    **Attributes:**

    - `microbatch_size`: sequences of a microbatch.
    - `sequence_length`: tokens of a sequence.
    - `dtype`: of the layers' matrix multiplications; `mxfp8` and `fp4` have a factor for each 32
        and 16 values. Everything else of these and of `fp8` is `bf16`.
    - `recompute`: what the backward computes again: nothing, the modules of `recompute_modules`
        (`selective`), or whole layers (`full`).
    - `recompute_modules`: as in Megatron-LM: `core_attn`, `layernorm`, `mlp`, `moe`, `moe_act`,
        `shared_experts`, `mla_up_proj`.
    - `recompute_method`, `recompute_layers`: of whole layers: `uniform` keeps the input of every
        `recompute_layers` layers, `block` computes the first `recompute_layers` layers of each
        stage again.
    - `zero`: what is sharded over the replicas: nothing (0), the optimizer (1), gradients too,
        which each microbatch reduce-scatters (2), parameters too, which it gathers layer by layer
        (3, known as FSDP).
    - `accumulate_gradients`: whether sharded gradients are summed over the microbatches that run
        through a stage consecutively, and reduce-scattered after the last of these, beside what
        follows; they are unsharded until then. Otherwise each microbatch reduce-scatters its own.
    - `reshard_after_forward`: whether gathered parameters are freed after a forward; otherwise they
        are kept for the backward.
    - `prefetch`: how many layers ahead parameters are gathered, beside compute; they need memory.
        With 0 the gathers are exposed. More than one layer is no faster than one.
    - `optimizer_instances`: how many copies there are of what is sharded: each is sharded over
        equally many neighbouring replicas, and the copies reduce the gradients of their shards (of
        FSDP, hybrid sharding).
    - `attention`: one fused kernel, where `flash` is the fastest of the device and `flash-1` and
        `flash-2` are FlashAttention 1 and 2; or `unfused`, its separate kernels.
    - `sequence_parallel`: whether norms and dropouts are split over the tensor-parallel group.
    - `scatter_send_recv`: whether, where norms are not split, each rank of a tensor-parallel group
        sends a part of what it sends to another pipeline rank, and the receivers gather the parts
        (the scatter/gather optimization of Narayanan et al. 2021, arXiv:2104.04473, section 4.1);
        otherwise each sends all of it. Where norms are split each has a part only, and this has no
        effect.
    - `cp_comm_type`: how attention in a context-parallel group gets the keys and values of other
        ranks, as Megatron-LM calls it: round a ring (`p2p`), gathered (`all_gather`), or by
        exchanging tokens for heads (`a2a`).
    - `cp_load_balance`: whether each rank of the group has an early and a late part of a sequence,
        so that a causal mask leaves all of them equal work; otherwise the last rank has the most.
    - `tp_overlap`: whether tensor-parallel collectives run in pieces beside their matrix
        multiplications.
    - `overlap_tp_backward`: whether the tensor-parallel collectives of a backward run beside its
        matrix multiplications, as in Megatron-LM since 2022. In software of 2021 they do not.
    - `overlap_grad_reduce`, `overlap_param_gather`: whether the data-parallel collectives run
        beside the backward and the forward; `overlap_grad_reduce` also those of gradients that each
        microbatch reduce-scatters.
    - `token_dispatcher`: how tokens come to experts, in Megatron-Core's terms: `alltoall` sends one
        copy to each of a token's experts, `flex` (DeepEP, HybridEP) one to each rank that has any
        of them, and one to each node, and permutes tokens only where they arrive.
    - `overlap_shared_experts`: whether the shared experts run beside the exchanges with the others,
        as with Megatron-Core's `moe-shared-expert-overlap`.
    - `gradient_bucket_size`: at least how many parameters of the first stage have their gradients
        reduced together, where that runs beside the backward; by default 40 million, or one million
        for each replica, if that is more. Other stages reduce theirs at once.
    - `gradient_dtype`: in which gradients are reduced.
    - `launch_floor_s`: no compute kernel is shorter: how long the host takes to launch one.
    - `software`: the stack whose switches these are, where the job does not set them itself.
    """

    microbatch_size: Count
    sequence_length: Count
    dtype: Literal["bf16", "fp16", "fp8", "mxfp8", "fp4"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[RecomputedModule, ...] = ("core_attn",)
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_layers: Count = 1
    zero: Literal[0, 1, 2, 3] = 1
    accumulate_gradients: bool = False
    reshard_after_forward: bool = True
    prefetch: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    optimizer_instances: Count = 1
    attention: Literal["flash", "flash-1", "flash-2", "unfused"] = "flash"
    sequence_parallel: bool = True
    scatter_send_recv: bool = False
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    cp_load_balance: bool = True
    tp_overlap: bool = False
    overlap_tp_backward: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    token_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    overlap_shared_experts: bool = False
    gradient_bucket_size: Count | None = None
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    launch_floor_s: NonNegative = 0.0
    software: Name | None = None

    @property
    def base_dtype(self) -> str:
        """The dtype of activations, and of what is not multiplied in a narrower one."""
        return self.dtype if self.dtype in ("bf16", "fp16") else "bf16"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of the step time.

    **Attributes:**

    - `source`: by whom, and how.
    - `mean_s`, `std_s`, `p5_s`, `p50_s`, `p95_s`, `p99_s`: the mean, the standard deviation and
        quantiles of the step time.
    - `num_samples`: how many steps were measured.
    """

    source: Text
    mean_s: Positive | None = None
    std_s: Positive | None = None
    p5_s: Positive | None = None
    p50_s: Positive | None = None
    p95_s: Positive | None = None
    p99_s: Positive | None = None
    num_samples: Count | None = None


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training job. One that only says how a trace was recorded has no model and no cluster.

    **Attributes:**

    - `layout`, `schedule`: how it is split, and in which order its ops run.
    - `world_size`: the product of the degrees.
    - `model`, `cluster`, `training`: what is computed, where and how; all three or none.
    - `kernels`: the profile of the cluster's kernels, with the changes of `calibrated`.
    - `calibrated`: what measured step times changed in it.
    - `measured`: what is known of its step time.
    - `name`, `source`: what it is called, and where the configuration is from.
    """

    layout: Layout
    schedule: ScheduleConfig
    world_size: Count | None = None
    model: Model | None = None
    cluster: Cluster | None = None
    training: Training | None = None
    kernels: Kernels | None = None
    calibrated: Calibrated | None = None
    measured: Measured | None = None
    name: Label = ""
    source: str = ""

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        degrees = {name: getattr(self.layout, name) for name in ("tp", "pp", "dp", "cp", "ep")}
        layout = ", ".join(f"{name} {n}" for name, n in degrees.items() if n > 1) or "one GPU"
        order = self.schedule
        virtual = f", {order.virtual_stages} virtual stages" if order.virtual_stages > 1 else ""
        rows = [
            ("layout", f"{layout}: {self.layout.world_size:,} GPUs"),
            ("schedule", f"{order.kind}, {order.num_microbatches} microbatches{virtual}"),
        ]
        if self.model is not None:
            rows.append(("model", f"{self.model.name}, {self.model.num_layers} layers"))
        if self.cluster is not None:
            rows.append(("cluster", f"{self.cluster.name}, {self.cluster.num_nodes:,} nodes"))
        if (how := self.training) is not None:
            size = f"{how.microbatch_size} x {how.sequence_length:,} tokens a microbatch"
            rows.append(("training", f"{how.dtype}, {size}, recompute {how.recompute}"))
        if self.measured is not None and self.measured.p50_s is not None:
            rows.append(("measured p50", f"{self.measured.p50_s:g} s"))
        return Summary(f"Job {self.name}", rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each table of kernels that stands in for one that is not there."""
        if self.kernels is None:
            return ()
        notes = self.kernels.notes
        dtype = "" if self.training is None else self.training.dtype
        found = self.kernels.find_efficiency("gemm", dtype)
        if found is not None and found.variant not in (dtype, ""):
            notes += (
                f"no efficiency of matrix multiplications in {dtype} is known here, so that of "
                f"{found.variant}, as a part of the peak, stands in.",
            )
        return notes
