"""Diffusion transformers: published sizes and operations, and closed forms of their modules."""

import math
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.data import load_job, load_model
from prism_jax.workload import count_parameters

from .helpers import kernels_of, lower_job


_JOBS = ("dit-xl-2-a100-8", "latte-xl-2-a100-8", "wan2.1-t2v-14b-h100-256")


def _flop(block, kinds=("gemm", "attention")):
    return sum(k.flop * n for k, n in kernels_of(block).items() if k.kind in kinds)


@pytest.mark.parametrize(("tokens", "giga"), [(256, 118.64), (1024, 524.60)])
def test_a_forward_of_dit_has_the_published_operations(tokens, giga):
    """Peebles and Xie 2023, table 4: multiply-adds of one image of 256 and of 512 pixels."""
    size = f"training.sequence_length={tokens}"
    work = lower_job(load_job("dit-xl-2-a100-8", (size, "training.microbatch_size=2")))
    assert _flop(work.forward[0]) / 2 / 2 == pytest.approx(giga * 1e9, rel=5e-4)


def test_attention_within_frames_and_across_them():
    """Each of 4096 tokens sees the 256 of its frame in one half of the blocks, and the 16 of its
    place in the other; a product forward is two operations for each value of a head."""
    tokens, hidden = 4096, 1152
    work = lower_job(load_job("latte-xl-2-a100-8", ("training.microbatch_size=1",)))
    pairs = 14 * tokens * (256 + 16)
    for block, products in ((work.forward[0], 2), (work.backward[0], 5)):
        assert _flop(block, ("attention",)) == 2 * products * pairs * hidden


@pytest.mark.parametrize("name", _JOBS)
def test_halves_of_a_backward_are_the_whole(name):
    """Each product of a forward has two in the backward, but those of what is read have one."""
    job: Any = load_job(name, ("training.recompute=none", "layout.cp=1"))
    work = lower_job(job)
    gemm = ("gemm",)
    forward, whole = (_flop(blocks[0], gemm) for blocks in (work.forward, work.backward))
    halves = [_flop(blocks[0], gemm) for blocks in (work.backward_input, work.backward_weight)]
    assert sum(halves) == pytest.approx(whole, rel=1e-12)
    hidden, batch = job.model.hidden_size, job.training.microbatch_size
    tokens = batch * job.training.sequence_length
    read = 2 * tokens * hidden * job.model.modules["patches"]["patch_values"]
    assert whole == pytest.approx(2 * forward - read, rel=1e-12)


def test_a_norm_that_is_modulated_has_no_parameters_of_its_own():
    """A table has three entries for each value and module; the norm before the text stays."""
    model: Any = load_model("wan2.1-t2v-14b")
    (layer,) = model.layers
    plain = msgspec.structs.replace(layer, modules=layer.modules[1:])
    bare = msgspec.structs.replace(model, layers=(plain,))
    added = count_parameters(model) - count_parameters(bare)
    assert added == 40 * (2 * 3 - 2 * 2) * model.hidden_size


def test_memory_kept_by_modulation():
    job = load_job("dit-xl-2-a100-8")
    parts = prism.memory(job).ranks[0].parts
    values = 28 * 2 * 32 * 256 * 1152
    assert parts["modulation"] == 2 * 2 * values
    assert "logits" not in parts


@pytest.mark.parametrize("name", _JOBS)
def test_shipped_jobs_are_predicted(name):
    prediction = prism.predict(load_job(name))
    assert 0.2 < prediction.mfu < 0.7
    assert math.isclose(sum(prediction.breakdown.values()), prediction.mean, rel_tol=1e-9)
