"""Laws of all jobs, tested with jobs that are drawn at random."""

from typing import Any

import numpy as np
import pytest

from prism_jax import predict
from prism_jax.data import Job
from prism_jax.maxplus import op_ends
from prism_jax.program import Overlaps, Program, compile_job

from .drawn_jobs import draw_job


def _matrices(job: Job, name: str) -> int:
    """The weights of a module's matrices that a token meets."""
    model, table = job.model, (job.model.modules or {}).get(name, {})
    hidden, gated = model.hidden_size, 2 if model.activation == "swiglu" else 1
    assert model.num_heads is not None
    assert model.num_kv_heads is not None
    match name:
        case "attention":
            kv = hidden // model.num_heads * model.num_kv_heads
            return 2 * hidden * hidden + 2 * hidden * kv
        case "mla":
            heads, latent = model.num_heads, table["kv_lora_rank"]
            key, value = table["qk_head_size"], table["value_head_size"]
            queries = heads * (key + table["qk_rope_head_size"])
            down = latent + table["qk_rope_head_size"] + table.get("q_lora_rank", 0)
            up = table.get("q_lora_rank", hidden) * queries + latent * heads * (key + value)
            return hidden * down + up + heads * value * hidden
        case "mamba":
            inner, states = 16 * 32, 2 * 8 * table["state_size"]
            return hidden * (2 * inner + states + 16) + inner * hidden
        case "mlp":
            assert model.ffn_size is not None
            return (gated + 1) * hidden * model.ffn_size
        case "moe":
            shared = table.get("shared_ffn_size", 384 * table.get("num_shared_experts", 0))
            router = 24 + bool(table.get("shared_gate"))
            return hidden * (router + (gated + 1) * (3 * 384 + shared))
    raise AssertionError(name)


def _scores(job: Job, name: str) -> float:
    """The operations of a sequence in a module besides those of matrices."""
    model, table = job.model, (job.model.modules or {}).get(name, {})
    length = job.training.sequence_length
    if name == "mamba":  # A chunk of 128 tokens with itself, and with a state; of each head.
        state = table["state_size"]
        return 2 * length * (8 * 128 * state + 16 * 32 * (128 + 2 * state))
    if name == "mla":
        size = table["qk_head_size"] + table["qk_rope_head_size"] + table["value_head_size"]
        return 2 * 8 * size * length**2 / 2
    if name == "attention":
        seen = min(table.get("window", length), length)
        pairs = (seen * length - seen**2 / 2) * (1 if table.get("causal", True) else 2)
        return 2 * 2 * model.hidden_size * pairs
    return 0.0


def _counted(job: Job) -> float:
    """The operations of a step: two for each weight and token, and scores; twice in a backward."""
    model, layers, length = job.model, job.model.layers, job.training.sequence_length
    backward = 0 if job.training.forward_only else 2

    def of_layer(layer) -> float:
        weights = sum(_matrices(job, name) for name in layer.modules)
        return 2 * length * weights + sum(_scores(job, name) for name in layer.modules)

    hidden = model.hidden_size
    head = 2 * length * hidden * (model.vocab_size + hidden * model.head_transforms)
    total = (1 + backward) * head
    for layer in layers:
        total += of_layer(layer) * (1 + (0 if layer.frozen else backward))
    more = 2 * length * 2 * hidden**2 + of_layer(layers[-1]) + head
    return (total + (1 + backward) * model.num_mtp_layers * more) * job.batch_size


def _together(branches: Overlaps | None, inner: np.ndarray, means: np.ndarray) -> Any:
    """How long branches add to each class, from the latencies of their compute and kernels."""
    if branches is None:
        return 0.0
    compute = branches.compute @ inner
    longest = (branches.communication @ means).max(axis=1)
    alpha, beta = np.array(branches.slowdowns).T
    return branches.classes @ np.maximum(longest + beta * compute, compute + alpha * longest)


def _constant_step(program: Program) -> float:
    """The step of a program in which nothing varies, in seconds."""
    blocks, sinks, means = program.blocks, program.sinks, np.asarray(program.latencies.mean)
    segments = blocks.segments @ means
    classes = blocks.class_segments @ segments + blocks.class_collectives @ means
    classes += _together(blocks.branches, segments, means)
    alone = classes
    for _ in range(4):  # Classes are in branches and waits of others, to some depth.
        classes = alone + _together(blocks.outer_branches, classes, means)
        if blocks.waits is not None:
            for within, count in zip(blocks.waits.within, blocks.waits.classes, strict=True):
                classes = classes + count * classes[within]
    of_ops = classes[program.rows.class_][program.ops.row]
    ends = op_ends(program.levels, of_ops[:, None])[program.levels.sink_ops].max(axis=1)[:, 0]
    step, rank, reduced = 0.0, sinks.rank, sinks.reduction
    reductions = np.where(reduced >= 0, classes[reduced], 0)
    for sink, end in enumerate(ends):
        before = reductions[(rank == rank[sink]) & (np.arange(len(ends)) < sink)].sum()
        after = reductions[(rank == rank[sink]) & (np.arange(len(ends)) >= sink)].sum()
        step = max(step, end + sinks.contention * before + after)
    return step + (classes[program.tail] if program.tail >= 0 else 0)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_drawn_jobs_take_as_long_as_predicted_and_do_the_work_of_their_model(first):
    """A step is that of the program without variability. Each operation counts once, on any layout
    and by any kernel.
    """
    for seed in range(first, first + 20):
        job = draw_job(seed)
        prediction = predict(job)
        step = _constant_step(compile_job(job))
        assert step == pytest.approx(prediction.mean, rel=1e-9), job.name
        assert sum(prediction.breakdown.values()) == pytest.approx(step, rel=1e-9), job.name
        flop = prediction.flop_per_s * prediction.mean * job.layout.world_size
        assert flop == pytest.approx(_counted(job), rel=1e-9), job.name
