"""Compute and collectives side by side, against every kernel of them drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.collapse import Overlaps
from prism_jax.collapse._branches import branch_moments, together
from prism_jax.program import Network
from prism_jax.replica import make_plan
from prism_jax.workload import Block, Branches, Kernel, Segment, block_mean

from .helpers import block_program, by_numpy, side_by_side


def _block(scale: float, contention: tuple[float, float], times: int = 1) -> Block:
    """Something alone, then compute beside collectives that take `scale` as long, in two rows."""
    alone = (Kernel("norm", "a", 3e-4), 2)
    compute = ((Kernel("gemm", "b", 1e-3), 1), (Kernel("norm", "c", 2e-4), 2))
    first = ((Kernel("all_gather", "d", scale * 7e-4, "nvlink"), 2),)
    second = ((Kernel("reduce_scatter", "e", scale * 1.3e-3, "network"), 1),)
    last = Kernel("all_gather", "f", 2e-4, "nvlink")
    branches = Branches(compute, (first, second), contention)
    return ((Segment((alone,), last, (branches,) * times), 1),)


def _program(block: Block, members: int, spread: float, gpus: float, **options):
    network = Network(jnp.asarray(0.5), jnp.asarray(1.5))
    options |= {"network": network, "network_links": ("network",)}
    return block_program(block, members, spread, gpus, **options)


def _every_kernel(rng, block: Block, program, samples: int, regime: int):
    """Draws of a block's latency, and of its slowest GPU, kernel by kernel. NumPy."""
    ((segment, _),) = block
    members = program.group_size
    gpus = np.exp(float(program.variability.rank.sigma) * rng.standard_normal((samples, members)))
    gpus /= np.exp(float(program.variability.rank.sigma) ** 2 / 2)

    slower = np.asarray(program.variability.network.factors())

    def run(row, shape):
        total = np.zeros(shape)
        for kernel, count in row:
            sigma = float(program.variability.residual[kernel.kind].sigma)
            slowed = slower[regime] if kernel.link == "network" else 1.0
            drawn = np.exp(sigma * rng.standard_normal((count, *shape)) - sigma**2 / 2)
            total += kernel.mean * slowed * drawn.sum(axis=0)
        return total

    ends = gpus * run(segment.kernels, gpus.shape)
    for branches in segment.branches:
        start = ends.max(axis=1, keepdims=True)
        compute = ends + gpus * run(branches.compute, gpus.shape) - start
        longest = np.max([run(row, start.shape) for row in branches.communication], axis=0)
        ends = start + side_by_side(compute, longest, branches.contention)
    end = ends.max(axis=1)
    if segment.collective is not None:
        end += run(((segment.collective, 1),), (samples,))
    return end, gpus.max(axis=1)


def _assert_equal_to_every_kernel_drawn(block, members, spread, gpus, samples=60_000):
    rng = np.random.default_rng(3)
    program = _program(block, members, spread, gpus)
    tables = make_plan(program).tables
    assert tables.shared is not None
    for regime in range(2):
        drawn, slowest = _every_kernel(rng, block, program, samples, regime)
        mean, std, shared = (
            np.interp(slowest, np.asarray(tables.nodes), np.asarray(values))
            for values in (*tables.moments[:2, 0, regime], tables.shared[0, regime])
        )
        # Given the slowest GPU, what is left is the noise of kernels and other GPUs.
        assert np.std(drawn - mean) / np.sqrt(samples) < 3e-4 * np.mean(drawn)
        assert abs(np.mean(mean - drawn)) < 5e-4 * np.mean(drawn)
        whole = np.sqrt(np.var(mean) + np.mean(std**2 + shared**2))
        assert whole == pytest.approx(np.std(drawn), rel=0.02)


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize(("spread", "gpus"), [(0.01, 0.005), (0.03, 0.02), (0.002, 0.03)])
@pytest.mark.parametrize("contention", [(0.0, 0.0), (0.2, 0.3)])
def test_branches_equal_every_kernel_drawn(members, spread, gpus, contention):
    for scale in (0.5, 1.0, 1.6):
        _assert_equal_to_every_kernel_drawn(_block(scale, contention), members, spread, gpus)


@pytest.mark.parametrize("scale", [0.5, 1.6])
def test_members_do_not_wait_between_branches(scale):
    _assert_equal_to_every_kernel_drawn(_block(scale, (0.2, 0.0), 2), 8, 0.01, 0.005)


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
