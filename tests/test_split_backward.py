"""Programs of backwards in two halves, models that are there twice, and forwards alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.data import load_job
from prism_jax.lowering import job_parts
from prism_jax.prediction import constant_step, predict
from prism_jax.schedule import ForwardOnly, order_of
from prism_jax.workload import block_mean, lower

from .helpers import compile_with, lower_job


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
    work = lower_job(job.replace(**{"schedule.virtual_stages": virtual}))
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


_KINDS = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe", "chimera", "hanayo"]
_SMALL = "megatron-22b-a100-8"
_ALONE = "training.forward_only=true"


def _brute_force(schedule, latency):
    """When the last forward ends: each after the one before it on its rank, and after that of the
    stage before its own in its chain.
    """
    ends, free = {}, [0.0] * schedule.num_ranks
    left = [list(order) for order in schedule.orders()]
    while any(left):
        before = sum(map(len, left))
        for rank, order in enumerate(left):
            while order:
                stage, microbatch = map(int, order[0].split("F"))
                source = None if stage in schedule.chain_starts else (stage - 1, microbatch)
                if source is not None and source not in ends:
                    break
                start = max(free[rank], 0.0 if source is None else ends[source])
                ends[stage, microbatch] = free[rank] = start + latency[stage]
                order.pop(0)
        assert sum(map(len, left)) < before
    return max(free)


@pytest.mark.parametrize("kind", _KINDS)
def test_forwards_of_a_schedule_run_in_its_order(kind):
    virtual = 2 if kind in ("interleaved-1f1b", "zbv", "hanayo") else 1
    config = prism.data.ScheduleConfig(kind, 8, virtual_stages=virtual)
    whole = order_of(config, prism.Layout(pp=4))
    alone = order_of(config, prism.Layout(pp=4), prism.data.Training(1, 8, forward_only=True))
    assert alone == ForwardOnly(whole)
    latency = np.random.default_rng(0).uniform(1, 2, alone.num_stages)
    found = prism.evaluate(alone, forward=latency[:, None], backward=1.0).makespan
    assert found == pytest.approx(_brute_force(alone, latency))


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_the_pipeline_fills_once(virtual):
    """p ranks, m microbatches, v stages a rank, all equal: v m + p - 1 forwards of a stage."""
    config = prism.data.ScheduleConfig(
        "1f1b" if virtual == 1 else "interleaved-1f1b", 8, virtual_stages=virtual
    )
    order = ForwardOnly(order_of(config, prism.Layout(pp=4)))
    assert prism.evaluate(order, forward=1.0, backward=1.0).makespan == virtual * 8 + 4 - 1


@pytest.mark.parametrize("name", ["gpt3-175b-h100-4096", _SMALL, "deepseek-v3-h800-2048"])
def test_a_step_of_forwards_is_predicted_as_it_is_simulated(name):
    job: Any = load_job(name, [_ALONE])
    found = predict(job)
    assert found.mean == pytest.approx(constant_step(job)(job.kernels), rel=1e-12)
    assert sum(found.breakdown.values()) == pytest.approx(found.mean, rel=1e-12)
    assert set(found.phases) <= {"F"}
    assert not {"optimizer", "exposed dp"} & set(found.breakdown)


def test_a_law_of_forwards_is_that_of_their_constants():
    job = load_job(_SMALL, [_ALONE])
    program = compile_with(job, prism.Variability())
    law = prism.simulate(program, num_samples=256, key=jax.random.key(0), sampling="plain")
    assert law.mean == pytest.approx(predict(job).mean, rel=1e-5)


def test_forwards_have_a_third_of_the_products_and_no_gradients():
    both, alone = (predict(load_job(_SMALL, more)) for more in ((), (_ALONE,)))
    assert alone.flop_per_s * alone.mean == pytest.approx(both.flop_per_s * both.mean / 3)
    assert alone.mean < both.mean / 2.5


def test_memory_of_forwards_is_parameters_and_a_layer():
    job = load_job(_SMALL, [_ALONE])
    whole, found = prism.memory(load_job(_SMALL)), prism.memory(job)
    for one, other in zip(whole.ranks, found.ranks, strict=True):
        assert one.parts["parameters"] == other.parts["parameters"]
        assert not {"gradients", "optimizer"} & set(other.parts)
    more = ["schedule.num_microbatches=8", _ALONE]
    assert prism.memory(load_job(_SMALL, more)).fullest.bytes == found.fullest.bytes


def test_no_published_step_has_forwards_alone():
    error = prism.expected_error(load_job(_SMALL, [_ALONE]))
    assert error.num_runs == 0
    assert error.spread > prism.expected_error(load_job(_SMALL)).spread


def test_tail_of_a_forward_pass_has_only_host_time():
    job = load_job(_SMALL, [_ALONE])
    order = order_of(job.schedule, job.layout, job.training)
    work = lower(job_parts(job), order.stage_to_rank)
    assert not any(work.reductions)
    assert {k.kind for one, _ in work.tail for k, _ in one.kernels} <= {"host"}
