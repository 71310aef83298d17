"""Layers beside the collectives of their neighbours' parameters, against every kernel drawn."""

import equinox as eqx
import jax
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.replica import make_plan
from prism_jax.workload import Block, Branches, Kernel, Segment, block_mean, split_mean

from .helpers import block_program, kernels_of, lower_job, side_by_side


_CONTENTION = (0.2, 0.3)
_LAYERS = 3


def _block(scale: float, contention: tuple[float, float] = _CONTENTION) -> Block:
    """Layers of two segments, with branches of their own, beside collectives `scale` as long."""
    gemm, norm = Kernel("gemm", "a", 1e-3), Kernel("norm", "b", 2e-4)
    gather = Kernel("all_gather", "c", 3e-4, "nvlink")
    inside = Branches(((gemm, 1),), (((gather, 2),),), contention)
    layer = (
        (Segment(((gemm, 1), (norm, 2)), gather), 2),
        (Segment(((norm, 1),), None, (inside,)), 1),
    )
    long = Kernel("reduce_scatter", "d", scale * 2e-3, "nvlink")
    beside = Branches((), (((long, 2),),), contention, layer)
    return ((Segment((), long), 1), (Segment((), None, (beside,)), _LAYERS))


def _drawn(rng, block: Block, program, gpus):
    """Draws of a block's latency, kernel by kernel, given the GPUs of its members. NumPy."""
    end = np.zeros(len(gpus))

    def run(row, shape):
        total = np.zeros(shape)
        for kernel, count in row:
            sigma = float(program.variability.residual[kernel.kind].sigma)
            noise = np.exp(sigma * rng.standard_normal((count, *shape)) - sigma**2 / 2)
            total += kernel.mean * noise.sum(axis=0)
        return total

    for segment, times in block:
        for _ in range(times):
            ends = gpus * run(segment.kernels, gpus.shape)
            for one in segment.branches:
                start = ends.max(axis=1, keepdims=True)
                longest = np.max([run(row, start.shape) for row in one.communication], axis=0)
                if one.within:
                    compute = _drawn(rng, one.within, program, gpus)[:, None]
                else:
                    compute = ends + gpus * run(one.compute, gpus.shape) - start
                ends = start + side_by_side(compute, longest, one.contention)
            end += ends.max(axis=1)
            if segment.collective is not None:
                end += run(((segment.collective, 1),), end.shape)
    return end


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize("scale", [0.6, 1.0, 1.6])
def test_layers_beside_collectives_equal_every_kernel_drawn(members, scale):
    samples, block = 20_000, _block(scale)
    program = block_program(block, members, 0.02, 0.01)
    tables = make_plan(program).tables
    assert tables.shared is not None
    rng = np.random.default_rng(3)
    gpus = np.exp(0.01 * rng.standard_normal((samples, members)) - 0.01**2 / 2)
    drawn = _drawn(rng, block, program, gpus)
    mean, std, shared = (
        np.interp(gpus.max(axis=1), np.asarray(tables.nodes), np.asarray(values))
        for values in (*tables.moments[:2, 0, 0], tables.shared[0, 0])
    )
    assert np.std(drawn - mean) / np.sqrt(samples) < 2e-4 * np.mean(drawn)
    assert abs(np.mean(mean - drawn)) < 5e-4 * np.mean(drawn)
    whole = np.sqrt(np.var(mean) + np.mean(std**2 + shared**2))
    assert whole == pytest.approx(np.std(drawn), rel=0.02)


def _mean_of_table(program):
    return make_plan(program).tables.moments[0, 0, 0, 9]


def test_limits():
    """Nothing varies: exact. Contention that gains nothing: the sum. No contention: the longer."""
    for scale in (0.2, 1.0, 3.0):
        for contention in (_CONTENTION, (0.5, 2.0), (0.0, 0.0)):
            block = _block(scale, contention)
            found = float(_mean_of_table(block_program(block, 4, 0.0, 0.0)))
            assert found == pytest.approx(block_mean(block), rel=1e-6)
    alone = _block(1e-9, (0.0, 0.0))
    layers = block_mean(alone) - 2e-12
    for scale in (1.0, 3.0):
        beside = _LAYERS * 4e-3 * scale
        free, never = (block_mean(_block(scale, c)) for c in ((0.0, 0.0), (0.5, 2.0)))
        assert free == pytest.approx(2e-3 * scale + max(layers, beside))
        in_turn = block_mean(_block(1e-9, (0.5, 2.0)))
        assert never == pytest.approx(2e-3 * scale + in_turn + beside, rel=1e-6)


@pytest.mark.slow
def test_derivatives_equal_differences():
    program = block_program(_block(1.0), 4, 0.03, 0.01)
    means = np.asarray(program.latencies.mean)

    @jax.jit
    @jax.value_and_grad
    def mean_of_table(means):
        return _mean_of_table(eqx.tree_at(lambda p: p.latencies.mean, program, means))

    _, gradient = mean_of_table(means)
    for kernel, mean in enumerate(means):
        step = 1e-3 * mean
        ends = [
            float(mean_of_table(x)[0])
            for x in (means + step * np.eye(len(means))[kernel] * sign for sign in (1, -1))
        ]
        assert gradient[kernel] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3)


_SMALL = ("layout.tp=1", "layout.pp=1", "layout.dp=16", "schedule.kind=1f1b", "num_nodes=2")
_SMALL += ("schedule.virtual_stages=1", "model=llama-3.1-8b", "training.zero=3")


def _lowered(*overrides):
    return lower_job(prism.load_job("gpt3-175b-h100-768", (*_SMALL, *overrides)))


def test_equal_layers_are_priced_once():
    for phase in ("forward", "backward"):
        few, many = (getattr(_lowered(f"model.num_layers={n}"), phase)[0] for n in (8, 64))
        assert [one for one, _ in few] == [one for one, _ in many]
        assert sum(times for _, times in many) - sum(times for _, times in few) == 56


def test_prefetched_gathers_run_beside_the_layer_before():
    """The first gather, then every layer beside the gather of the next, by events, and the head."""
    alone, ahead = (_lowered(f"training.prefetch={n}").forward[0] for n in (0, 1))
    compute, exposed = split_mean(alone)
    gathers = {k: n for k, n in kernels_of(alone).items() if k.kind == "all_gather"}
    assert exposed == {"fsdp": pytest.approx(sum(k.mean * n for k, n in gathers.items()))}
    (first,) = (one.collective for one, _ in ahead if one.collective)
    assert first is not None
    expected, hidden = first.mean + sum(compute.values()), 1
    for one, times in ahead:
        for branches in one.branches:
            (a, b), layer = branches.contention, block_mean(branches.within)
            (((gather, _),),) = branches.communication
            both = min(layer * (1 + a), gather.mean * (1 + b))
            end = both + max(layer - both / (1 + a), gather.mean - both / (1 + b))
            expected += times * (end - layer)
            hidden += times
    assert hidden == 34  # The first, and beside the embedding and each of 32 layers.
    assert block_mean(ahead) == pytest.approx(expected)
    assert block_mean(ahead) < block_mean(alone)


def test_a_backward_deals_gradients_beside_the_next_layer():
    """What is gathered and what is dealt run one after the other, beside the layer between."""
    work = _lowered("model.num_layers=8")
    most = max(work.backward[0], key=lambda one: one[1])
    (row,) = most[0].branches[0].communication
    assert [kernel.kind for kernel, _ in row] == ["all_gather", "reduce_scatter"]
    bare = [one.collective.kind for one, _ in work.backward[0] if one.collective]
    assert bare == ["reduce_scatter"]  # Of the embedding. The head still has its parameters.
    in_turn = _lowered("model.num_layers=8", "training.overlap_grad_reduce=false").backward[0]
    assert split_mean(in_turn)[1]["fsdp"] > split_mean(work.backward[0])[1]["fsdp"]


def test_all_who_share_parameters_meet():
    work = _lowered()
    assert work.group_size == 16
    ((inner, _),) = next(one for one, _ in work.forward[0] if one.branches).branches[0].within
    assert inner.members == 16
