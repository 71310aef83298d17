"""Small jobs drawn at random: modules, layouts, schedules and settings in all combinations that are
allowed, so that none is refused.
"""

import functools as ft
from random import Random
from typing import Any

import msgspec

import prism_jax as prism
from prism_jax import data


_RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")
# The virtual stages that each schedule may have.
_SCHEDULES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "zb-h2"), (1,)),
    **dict.fromkeys(("looped-bfs", "interleaved-1f1b", "overlapped-1f1b"), (1, 2)),
    **dict.fromkeys(("interleaved-zero-bubble", "zb-greedy"), (1, 2)),
    **dict.fromkeys(("zbv", "v-half", "v-min", "dual-pipe-v"), (2,)),
    **dict.fromkeys(("dual-pipe", "chimera"), (1,)),
    "hanayo": (2, 4),
}
_TWO_WAYS = ("dual-pipe", "chimera")


@ft.cache
def _machine() -> tuple[data.Cluster, data.Kernels]:
    """A cluster none of whose kernels varies."""
    cluster = prism.load_cluster("dgx-h100", num_nodes=16)
    return cluster, msgspec.structs.replace(data.load_kernels(cluster), variability=())


def draw_job(seed: int) -> prism.Job:
    """A job of at most 128 GPUs, in which nothing varies."""
    rng = Random(seed)
    cluster, kernels = _machine()
    constant = {"constant_s": rng.choice((0.0, 0.02)), "constant_share": rng.choice((None, 0.05))}
    kernels = msgspec.structs.replace(kernels, growth=rng.choice((0.0, 0.01)), **constant)
    kinds = rng.choice([("attention",), ("attention",), ("mla",), ("attention", "mamba")])
    experts = rng.random() < 0.4
    layout = _layout(rng, experts=experts)
    schedule = _schedule(rng, layout.pp)
    training = _training(rng, layout, schedule, experts=experts)
    model, layers_per_stage = _model(rng, kinds, layout, schedule, training, experts=experts)
    schedule = msgspec.structs.replace(schedule, layers_per_stage=layers_per_stage)
    return prism.Job(
        layout,
        schedule,
        model=model,
        cluster=cluster,
        training=training,
        kernels=kernels,
        name=f"drawn-{seed}",
    )


def _layout(rng: Random, *, experts: bool) -> prism.Layout:
    tp, cp, dp = (rng.choice(degrees) for degrees in ((1, 1, 2, 4), (1, 1, 2), (1, 2, 4)))
    if not experts:
        return prism.Layout(tp=tp, pp=rng.choice((1, 2, 2, 4)), dp=dp, cp=cp)
    etp = rng.choice([one for one in (1, 2, 4) if tp % one == 0])
    ep = rng.choice([one for one in (1, 2, 4, 8) if tp * cp * dp % (one * etp) == 0])
    return prism.Layout(tp=tp, pp=rng.choice((1, 2, 2, 4)), dp=dp, cp=cp, ep=ep, etp=etp)


def _schedule(rng: Random, ranks: int) -> data.ScheduleConfig:
    names = [name for name in _SCHEDULES if ranks % 2 == 0 or name not in _TWO_WAYS]
    kind = rng.choice(names)
    free = kind in ("gpipe", "1f1b")
    return data.ScheduleConfig(
        kind,
        num_microbatches=rng.choice((1, 2, 3, 5) if free else (2 * ranks, 4 * ranks)),
        virtual_stages=rng.choice(_SCHEDULES[kind]),
        blocking=rng.choice((None, None, False)),
    )


def _training(
    rng: Random, layout: prism.Layout, schedule: data.ScheduleConfig, *, experts: bool
) -> data.Training:
    def either() -> bool:
        return rng.random() < 0.5

    zero = rng.choice((0, 1, 1, 2, 3))
    accumulates = zero >= 2 and schedule.kind not in _TWO_WAYS and either()
    replicas = layout.dp * layout.cp
    of_experts = replicas * layout.tp // (layout.ep * layout.expert_tp)
    instances = [one for one in (1, 2) if replicas % one == 0 and of_experts % one == 0]
    return data.Training(
        microbatch_size=rng.choice((1, 2, 3)),
        sequence_length=rng.choice((512, 1536)),
        dtype=rng.choice(("bf16", "bf16", "fp8")),
        recompute=rng.choice(("none", "selective", "by-op", "full")),
        recompute_modules=tuple(rng.sample(_RECOMPUTED, rng.randrange(1, 5))),
        recompute_method=rng.choice(("uniform", "block")),
        recompute_early_stop=either(),
        optimizer=rng.choice(("adam", "adam", "adagrad")),
        zero=zero,
        accumulate_gradients=accumulates,
        reshard_after_forward=either(),
        prefetch=rng.choice((0, 1)),
        gather_copy_bytes=rng.choice((0.0, 4.0)),
        gradient_copy_bytes=rng.choice((0.0, 4.0)),
        optimizer_instances=rng.choice(instances),
        attention=rng.choice(("flash", "unfused")),
        sequence_parallel=experts or either(),
        scatter_send_recv=either(),
        cp_comm_type=rng.choice(("p2p", "all_gather", "a2a")),
        cp_load_balance=either(),
        tp_overlap=either(),
        overlap_tp_backward=either(),
        overlap_grad_reduce=accumulates or either(),
        overlap_param_gather=either(),
        gather_in_turn=either(),
        token_dispatcher=rng.choice(("alltoall", "deepep", "hybridep")),
        overlap_shared_experts=layout.tp == 1 and either(),
        gradient_bucket_size=rng.choice((None, 10**6, 10**6)),
        gradient_dtype=rng.choice(("fp32", "bf16")),
        gradient_comm_dtype=rng.choice((None, "fp8")),
        gather_dtype=rng.choice(("bf16", "fp8")),
        optimizer_dtype=rng.choice(("fp32", "bf16")),
        loss=rng.choice((None, "eager", "vocab-parallel", "compiled", "fused")),
        loss_chunks=rng.choice((1, 4)),
        narrow_inputs=either(),
        scaling=rng.choice(("delayed", "tensor", "row")),
        eager_share=rng.choice((1.0, 0.5)),
        launch_floor_s=rng.choice((0.0, 2e-5)),
        host_module_s=rng.choice((0.0, 1e-3)),
        host_experts_s=rng.choice((0.0, 1e-3)),
        cuda_graphs=rng.choice(("none", "none", "modules", "iteration")),
        fused_experts=either(),
        fp8_attention=either(),
        fp8_head=either(),
        forward_only=rng.random() < 0.1,
        separate_products=either(),
        offload=rng.choice(((), ("activations",), ("optimizer",), ("activations", "optimizer"))),
        offload_layers=rng.choice((None, 1)),
        offload_fraction=rng.choice((1.0, 0.5)),
    )


def _model(
    rng: Random,
    kinds: tuple[str, ...],
    layout: prism.Layout,
    schedule: data.ScheduleConfig,
    training: data.Training,
    *,
    experts: bool,
) -> tuple[data.Model, Any]:
    """A model, and the layers of each stage."""
    stages = layout.pp * schedule.virtual_stages
    number = stages * rng.choice((1, 2))
    layers_per_stage: Any = None
    if rng.random() < 0.3:  # Uneven, some stages without layers.
        cuts = sorted(rng.randrange(number + 1) for _ in range(stages - 1))
        layers_per_stage = tuple(b - a for a, b in zip([0, *cuts], [*cuts, number], strict=True))
    elif rng.random() < 0.3:
        layers_per_stage, number = "auto", number + rng.choice((0, 1))
    frozen = rng.randrange(number) if rng.random() < 0.15 else 0
    layers = []
    for i in range(number):
        last = "moe" if experts and (i + 1 == number or rng.random() < 0.7) else "mlp"
        layers.append(data.Layer((rng.choice(kinds), last), frozen=i < frozen))
    window = rng.choice((None, 200))
    if layout.cp > 1 and training.cp_comm_type == "p2p":
        window = None
    attention = {"qk_norm": rng.random() < 0.5, "causal": rng.random() < 0.8}
    modules: dict[str, dict[str, Any]] = {
        "attention": attention | ({} if window is None else {"window": window}),
        "mla": {"kv_lora_rank": 64, "qk_head_size": 32, "qk_rope_head_size": 16}
        | {"value_head_size": 32}
        | ({"q_lora_rank": 96} if rng.random() < 0.5 else {}),
        "mamba": {"mamba_num_heads": 16, "mamba_head_size": 32, "state_size": 32},
        "moe": {"num_experts": 24, "top_k": 3, "expert_ffn_size": 384}
        | rng.choice(({}, {"num_shared_experts": 1}, {"shared_ffn_size": 512, "shared_gate": True}))
        | rng.choice(({}, {"num_groups": 4, "top_k_groups": 2})),
    }
    used = {name for layer in layers for name in layer.modules}
    model = data.Model(
        hidden_size=512,
        vocab_size=rng.choice((4096, 5001)),
        num_heads=8,
        num_kv_heads=8 if rng.random() < 0.5 else 4 if layout.tp * layout.cp < 8 else 8,
        ffn_size=rng.choice((1024, 2048)),
        layers=tuple(layers),
        modules={name: table for name, table in modules.items() if name in used},
        activation=rng.choice(("gelu", "swiglu")),
        position=rng.choice(("learned", "rotary", "none")),
        norm=rng.choice(("layernorm", "rmsnorm")),
        bias=rng.random() < 0.5,
        tied_embeddings=rng.random() < 0.5,
        dropout=rng.random() < 0.3,
        head_transforms=rng.choice((0, 0, 1)),
        num_mtp_layers=rng.choice((0, 0, 0, 1)),
        name="drawn",
    )
    return model, layers_per_stage
