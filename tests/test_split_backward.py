"""Backwards in two halves, and models that are there twice, down to the ends of a program."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.workload import block_mean, rows_of

from .helpers import lower_job


def _changed(job, part, **changes):
    return msgspec.structs.replace(
        job, **{part: msgspec.structs.replace(getattr(job, part), **changes)}
    )


def _kernels(*blocks, collectives=False):
    counts = Counter()
    for block in blocks:
        for segment, times in block:
            for row, by_member in rows_of(segment):
                for kernel, count in row if by_member or collectives else ():
                    counts[kernel] += times * count
    return counts


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_halves_of_a_backward_are_the_whole(dtype, tp, sequence_parallel):
    """The same kernels; what ran beside a weight's gradient has nothing to hide behind."""
    job: Any = _changed(prism.load_job("gpt3-175b-h100-4096"), "layout", tp=tp)
    job = _changed(job, "training", dtype=dtype, sequence_parallel=sequence_parallel)
    work = lower_job(job)
    halves = list(zip(work.backward_input, work.backward_weight, strict=True))
    for whole, both in zip(work.backward, halves, strict=True):
        assert _kernels(*both) == _kernels(whole)
        mean = sum(map(block_mean, both))
        if tp == 1:
            assert mean == pytest.approx(block_mean(whole), rel=1e-12)
        else:
            assert mean > block_mean(whole)
    bare = lower_job(_changed(job, "training", overlap_tp_backward=False))
    for stage, whole in enumerate(bare.backward):
        both = bare.backward_input[stage], bare.backward_weight[stage]
        assert _kernels(*both, collectives=True) == _kernels(whole, collectives=True)


@pytest.mark.parametrize(
    "schedule",
    [prism.ZBH1(4, 8), prism.ZBV(4, 8), prism.DualPipeV(4, 8), prism.DualPipe(4, 8)],
    ids=repr,
)
def test_a_program_ends_when_the_schedule_does(schedule):
    """Constant blocks by `evaluate`, with the stages of the model once for each chain."""
    job: Any = prism.load_job("megatron-22b-a100-8", ["layout.tp=2", "layout.pp=4"])
    chains = len(schedule.chain_starts)
    virtual = schedule.num_stages // 4 // chains
    work = lower_job(_changed(job, "schedule", virtual_stages=virtual))
    phases = ("forward", "backward", "backward_input", "backward_weight")
    costs: dict[str, Any] = {
        name: np.array([[block_mean(b)] for b in getattr(work, name) * chains]) for name in phases
    }
    (send,) = {kernel.mean for (a, b), kernel in work.send_recv.items() if abs(a - b) == 1}
    parts = (job.model, job.layout, schedule, job.cluster)
    options = {"training": job.training, "kernels": job.kernels}
    program = prism.compile_program(*parts, variability=prism.Variability(), **options)
    ends = prism.sample_replica_ends(program, jnp.arange(1, dtype=jnp.uint32), jax.random.key(0))
    expected = prism.evaluate(schedule, **costs, send_recv=send).rank_ends
    np.testing.assert_allclose(ends[:, 0], expected, rtol=1e-6)
    assert program.num_microbatches == 8


def test_microbatches_of_two_chains_have_data_of_their_own():
    job: Any = prism.load_job("megatron-22b-a100-8", ["layout.tp=2", "layout.pp=4"])
    parts = (job.model, job.layout, prism.DualPipe(4, 8), job.cluster)
    program = prism.compile_program(*parts, training=job.training, kernels=job.kernels)
    stage, microbatch = program.ops.stage, program.ops.microbatch
    assert set(microbatch[stage < 4]) == {0, 1, 2, 3}
    assert set(microbatch[stage >= 4]) == {4, 5, 6, 7}
    # There is one replica, but two copies of each stage, which reduce their gradients.
    assert program.num_replicas == 1
    assert (program.sinks.reduction >= 0).all()
