"""Compute and collectives side by side, of a layer or beside the layer before, against every kernel
of them drawn.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.op_law._branches import branch_moments, together
from prism_jax.program import Network, Overlaps
from prism_jax.replica import make_plan
from prism_jax.workload import Block, Branches, Kernel, Segment, block_mean, split_mean

from .helpers import block_program, by_numpy, kernels_of, lower_job
from .independent import Laws, simulate_block


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


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize("scale", [0.6, 1.0, 1.6])
def test_layers_beside_collectives_equal_every_kernel_drawn(members, scale):
    assert_equal_to_every_kernel_drawn(_block(scale), members, 0.02, 0.01)


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


def _two_rows(scale: float, contention: tuple[float, float], times: int = 1) -> Block:
    """Something alone, then compute beside collectives that take `scale` as long, in two rows."""
    alone = (Kernel("norm", "a", 3e-4), 2)
    compute = ((Kernel("gemm", "b", 1e-3), 1), (Kernel("norm", "c", 2e-4), 2))
    first = ((Kernel("all_gather", "d", scale * 7e-4, "nvlink"), 2),)
    second = ((Kernel("reduce_scatter", "e", scale * 1.3e-3, "network"), 1),)
    last = Kernel("all_gather", "f", 2e-4, "nvlink")
    branches = Branches(compute, (first, second), contention)
    return ((Segment((alone,), last, (branches,) * times), 1),)


def assert_equal_to_every_kernel_drawn(block, members, spread, gpus, network=None):
    """Given the slowest GPU, what is left is the noise of kernels and other GPUs."""
    links = ("network",) if network else ()
    law = None if network is None else Network(*map(jnp.asarray, network))
    program = block_program(block, members, spread, gpus, network=law, network_links=links)
    tables, samples = make_plan(program).tables, 120_000 if network else 60_000
    own: Any = program.variability.residual
    residual = {kind: float(law.sigma) for kind, law in own.items()}
    laws = Laws(residual, gpus, network=network or (0.0, 1.0))
    ends, slowest, congested = simulate_block(block, members, laws, samples, 3, links)
    for regime in range(2 if network else 1):
        drawn, factor = (x[congested == regime].astype(float) for x in (ends, slowest))
        mean, std, shared = (
            np.interp(factor, np.asarray(tables.nodes), np.asarray(values))
            for values in (*tables.moments[:2, 0, regime], tables.shared[0, regime])
        )
        assert np.std(drawn - mean) / np.sqrt(samples) < 3e-4 * np.mean(drawn)
        assert abs(np.mean(mean - drawn)) < 5e-4 * np.mean(drawn)
        whole = np.sqrt(np.var(mean) + np.mean(std**2 + shared**2))
        assert whole == pytest.approx(np.std(drawn), rel=0.02)


_NETWORK_LAW = (0.5, 1.5)


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize(("spread", "gpus"), [(0.01, 0.005), (0.03, 0.02), (0.002, 0.03)])
@pytest.mark.parametrize("contention", [(0.0, 0.0), (0.2, 0.3)])
def test_branches_equal_every_kernel_drawn(members, spread, gpus, contention):
    for scale in (0.5, 1.0, 1.6):
        block = _two_rows(scale, contention)
        assert_equal_to_every_kernel_drawn(block, members, spread, gpus, _NETWORK_LAW)


@pytest.mark.parametrize("scale", [0.5, 1.6])
def test_members_do_not_wait_between_branches(scale):
    block = _two_rows(scale, (0.2, 0.0), 2)
    assert_equal_to_every_kernel_drawn(block, 8, 0.01, 0.005, _NETWORK_LAW)


_together = by_numpy(together)


def _moments(mean, std, skewness, *shared):
    return jnp.asarray([mean, std**2, skewness * std**3, *shared], float)[:, None]


def _slowdowns(contention):
    kernel = (Kernel("all_gather", "", 1.0, "nvlink"), 1)
    return jnp.asarray(Branches((), ((kernel,),), contention).slowdowns)


@pytest.mark.parametrize("contention", [(0.0, 0.0), (0.15, 0.0), (0.2, 0.3), (0.5, 2.0)])
@pytest.mark.parametrize("longer", [0.4, 1.0, 2.5])
def test_without_variance_the_end_is_exact(contention, longer):
    """By events: both run slowed up to the first end, and then what is left runs at full speed."""
    a, b = contention
    first = min(1 + a, longer * (1 + b))
    end = first + max(1 - first / (1 + a), longer - first / (1 + b))
    found = _together(_moments(1, 0, 0, 0), _moments(longer, 0, 0), _slowdowns(contention))
    assert found[:, 0].tolist() == pytest.approx([end, 0, 0, 0], abs=1e-14)
    compute = ((Kernel("gemm", "", 0.5), 2),)
    collectives = ((Kernel("all_gather", "", longer, "nvlink"), 1),)
    one = Segment(compute, None, (Branches(compute, (collectives,), contention),))
    assert block_mean(((one, 3),)) == pytest.approx(3 * (1 + end))


def test_branches_without_overlap_add_up():
    """What slows so much that nothing is gained leaves one after the other."""
    found = _together(_moments(1.0, 0.1, 0.3, 0.0), _moments(1.1, 0.2, 0.5), _slowdowns((0.5, 2.0)))
    assert found[:2, 0].tolist() == pytest.approx([2.1, 0.1**2 + 0.2**2], rel=2e-4)
    assert found[2, 0] == pytest.approx(0.3 * 0.1**3 + 0.5 * 0.2**3, rel=3e-3)


@pytest.mark.parametrize("std", [1e-6, 0.01, 0.3])
def test_fully_overlapped_branches_take_their_maximum(std):
    """Of two normals: Clark 1961. The first absolute moments, with another mean of the second."""
    free = _slowdowns((0.0, 0.0))
    found = _together(_moments(1.0, std, 0.0, 0.0), _moments(1.0, std, 0.0), free)
    assert found[0, 0] == pytest.approx(1 + std / np.sqrt(np.pi), rel=1e-7)
    assert found[1, 0] == pytest.approx(std**2 * (1 - 1 / np.pi), rel=1e-4)
    # What is always longer is the end, also with what it shares.
    alone = _together(_moments(5.0, 0.6 * std, 0.1, 0.8 * std), _moments(1.0, std, 0.0), free)
    rest = 0.6**2 * std**2, 0.1 * 0.6**3 * std**3, 0.8 * std
    assert alone[:, 0].tolist() == pytest.approx([5.0, *rest], rel=2e-3, abs=1e-12)


# Two branches of two rows of collectives; kernels 0 to 2 compute, the third before the branches.
_OVERLAPS = Overlaps(
    compute=jnp.asarray([[1.0, -1.0], [0.0, 1.0]]),
    communication=jnp.zeros((2, 2, 7)).at[0, 0, 3].set(2).at[0, 1, 4].set(1).at[1, 0, 5].set(1),
    slowdowns=jnp.asarray([[0.15, 0.0], [0.2, 0.3]]),
    classes=jnp.asarray([[1.0, 0.0], [2.0, 3.0]]),
)
_SEGMENTS = jnp.asarray([[1.0, 2.0, 1.0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0, 0]])
_NETWORK = jnp.ones((7, 2)).at[4, 1].set(1.4)


def _of_kernels(cumulants, factor=1.0, *, apart=False):
    """Of one member, whose GPUs have three factors."""
    gpus = factor * jnp.asarray([0.98, 1.0, 1.02])
    compute = (cumulants @ _SEGMENTS.T)[:, :, None] * jnp.stack([gpus, gpus**2, gpus**3])[:, None]
    compute = jnp.concatenate([compute, 0.01 * compute[:1]])
    alone = compute[:, :, None], jnp.zeros((3, len(_SEGMENTS), 1))
    return branch_moments(_OVERLAPS, cumulants, _NETWORK, *alone, apart=apart)


def _cumulants(spread):
    mean = jnp.asarray([0.5, 0.3, 0.4, 0.6, 1.1, 0.4, 0.1])
    return jnp.stack([mean, (spread * mean) ** 2, 0.4 * (spread * mean) ** 3])


@by_numpy
@jax.value_and_grad
def _weighed(cumulants, weights):
    return jnp.sum(weights * _of_kernels(cumulants)[0])


@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_derivatives_of_every_kernel_equal_differences(spread):
    # Moments in units of what they are, or the mean would be all there is.
    weights = np.random.default_rng(0).standard_normal((4, 2, 2, 3))
    weights /= np.array([1, spread, spread**2, spread])[:, None, None, None]
    at = _cumulants(spread)
    gradient = np.asarray(_weighed(at, weights)[1])
    for order, kernel in np.ndindex(3, 6):
        step = 1e-4 * at[order, kernel] * (spread if order == 0 else 1)
        there = jnp.zeros_like(at).at[order, kernel].set(step)
        more, less = (_weighed(at + sign * there, weights)[0] for sign in (1, -1))
        difference = float((more - less) / (2 * step))
        scale = np.abs(gradient[order]).max()
        assert gradient[order, kernel] == pytest.approx(difference, rel=1e-3, abs=1e-4 * scale)


def test_communication_and_compute_share_the_derivative_of_a_segments_end():
    """A little more of all compute adds the rest of each cumulant, times its order."""
    found = by_numpy(lambda factor: _of_kernels(_cumulants(0.05), factor, apart=True))
    step = 1e-4
    (whole, apart, *_), (more, *_), (less, *_) = (found(1 + k * step) for k in (0, 1, -1))
    growth = np.asarray(more - less)[:3, ..., 1] / (2 * step)
    rest = np.asarray(whole[:3, ..., 1] - apart)
    orders = np.arange(1, 4)[:, None, None]
    # The mean is exact; of the others this leaves out what GPUs share, which is drawn apart.
    assert growth[0] == pytest.approx(rest[0], rel=1e-4)
    assert growth / (orders * rest) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_single_precision_is_enough(dtype):
    """With single precision's own derivatives, also where nothing varies, and in a tie."""

    @jax.jit
    @jax.value_and_grad
    def mean(compute, communication):
        return together(compute, communication, jnp.asarray([0.15, 0.0], dtype))[0, 0]

    for spread in (0.0, 1e-5, 1e-3, 0.1):
        compute = _moments(10.0, 10 * spread, 0.2, 0.0).astype(dtype)
        free = mean(compute, _moments(8.5, spread, 0.1).astype(dtype))
        tied = mean(compute, _moments(10 / (1 - 0.15), spread, 0.1).astype(dtype))
        if spread < 0.01:
            assert free[0] == pytest.approx(10 + 0.15 * 8.5, rel=1e-5)
            assert free[1][0] == pytest.approx(1, rel=1e-3)
        # The expected excess of a normal over its mean, less what its skewness takes.
        assert tied[0] == pytest.approx(10 / 0.85 + 4 * spread, rel=1e-5, abs=0.1 * spread)
        assert tied[1][0] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("shared", [0.0, -1e-146, 1e-30, 1e-9])
def test_compute_that_hardly_varies_has_finite_moments(shared):
    """As it is without the spread of its kernels, where differences of moments are rounding."""
    compute = jnp.array([0.024, 0.0, 0.0, shared])
    communication = jnp.array([8e-3, 2.8e-8, 2.9e-13])
    found = np.asarray(together(compute, communication, jnp.array([0.15, 0.0])))
    assert np.all(np.isfinite(found))
    assert found[0] == pytest.approx(0.024 + 0.15 * 8e-3, rel=1e-6)
    assert abs(found[3]) <= abs(shared) * (1 + 1e-6)
