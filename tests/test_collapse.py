import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from prism_jax.engine import simulate
from prism_jax.latency import LogNormal, Mixture
from prism_jax.op_law import gpu_factors
from prism_jax.op_law._segment import NODE_SCORES, segment_maxima
from prism_jax.program import Variability
from prism_jax.program._assemble import assemble
from prism_jax.schedule import OneFOneB, op_graph
from prism_jax.workload import Kernel, Segment

from .helpers import by_numpy, lognormal
from .independent import Laws, Step, simulate_steps


_segment_maxima = by_numpy(segment_maxima)


def _group(rank, count):
    """The factors of a group of GPUs, and how many they are."""
    return _first_group(rank, jnp.asarray([count], float)), jnp.asarray(count, float)


@by_numpy
def _first_group(rank, counts):
    groups, _ = gpu_factors(rank, counts, jnp.zeros(1, counts.dtype))
    return jax.tree.map(lambda x: x[0], groups)


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("gpu_sigma", [0.0, 0.01, 0.04])
@pytest.mark.parametrize(("cv", "skewness"), [(0.01, 0.3), (0.05, 0.5), (0.0, 0.0)])
def test_the_slowest_member_equals_brute_force(count, gpu_sigma, cv, skewness):
    """Draws every member with its own GPU; then draws the collapsed law given the slowest GPU."""
    rng = np.random.default_rng(1)
    samples = 400_000
    rank = lognormal(gpu_sigma) if gpu_sigma else None
    group, number = _group(rank, count)
    variance, third = jnp.asarray(cv**2), jnp.asarray(skewness * cv**3)
    moments = np.asarray(_segment_maxima(jnp.asarray(1.0), variance, third, group, number))
    nodes = np.asarray(group.slowest)

    gpus = np.exp(gpu_sigma * rng.standard_normal((samples, count)) - gpu_sigma**2 / 2)
    if skewness:
        shape = 4 / skewness**2
        runs = 1 + cv * (rng.gamma(shape, 1, (samples, count)) - shape) / np.sqrt(shape)
    else:
        runs = np.ones((samples, count))
    expected = (gpus * runs).max(axis=1)
    slowest = gpus.max(axis=1)

    def at(values):
        return np.interp(slowest, nodes, values) if gpu_sigma else np.full(samples, values[0])

    mean, variance, third, shared = map(at, moments)
    std = np.hypot(np.sqrt(variance), shared)  # One segment alone draws both.
    g = third / np.maximum(std, 1e-12) ** 3
    t = rng.standard_normal(samples) / 6 - g / 36
    drawn = mean + std * 6 * t * (1 + g * t * (1 + g * t / 3))

    # Given the slowest GPU, what is left is the members' noise alone.
    error = np.std(expected - mean) / np.sqrt(samples)
    assert abs(np.mean(mean - expected)) < 5 * error + 2e-5
    # The 99th percentiles are each known to about this.
    noise = 4 * np.sqrt(2 * 0.99 * 0.01 / samples) / 0.0267 * np.std(expected)
    assert abs(np.quantile(drawn, 0.99) - np.quantile(expected, 0.99)) < 1e-3 + noise
    assert np.std(drawn) == pytest.approx(np.std(expected), rel=0.01, abs=1e-9)


@by_numpy
def _from_normal(law, scores):
    return law.from_normal(scores)


_SLOW_GPUS = Mixture(jnp.array([0.99, 0.01]), (lognormal(0.01), LogNormal(1.1, 0.01)))


@pytest.mark.parametrize(
    ("rank", "count", "within"),
    [*((lognormal(0.02), count, 1e-5) for count in (2, 8, 64, 512)), (_SLOW_GPUS, 8, 5e-4)],
)
def test_mean_of_the_slowest_member_equals_its_integral(rank, count, within):
    """The formula at the top of `_segment.py`, integrated over fine grids."""
    cv = 0.01
    group, number = _group(rank, count)
    variance = jnp.asarray(cv**2)
    found = _segment_maxima(jnp.asarray(1.0), variance, jnp.zeros(()), group, number)
    for node in range(0, len(NODE_SCORES), 6):
        slowest = float(group.slowest[node])
        highest = scipy.special.ndtri(scipy.special.ndtr(NODE_SCORES[node]) ** (1 / count))
        z = np.linspace(-8, highest, 1001)
        gpu = np.asarray(_from_normal(rank, jnp.asarray(z)) / rank.mean())
        x = np.linspace(1 - 10 * cv, slowest * (1 + 12 * cv), 401)
        ended = scipy.stats.norm.cdf((x[:, None] / gpu - 1) / cv)
        weight = scipy.stats.norm.pdf(z)
        each = np.trapezoid(ended * weight, z) / np.trapezoid(weight, z)
        law = scipy.stats.norm.cdf((x / slowest - 1) / cv) * each ** (count - 1)
        assert found[0, node] == pytest.approx(x[-1] - np.trapezoid(law, x), abs=within)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("gpu_sigma", [0.003, 0.01, 0.03])
def test_segments_of_the_same_gpus_vary_together_as_brute_force(count, gpu_sigma):
    """The covariance of two segments that the same GPUs run, given the slowest: each draws its runs
    anew, but not its GPUs.
    """
    rng = np.random.default_rng(2)
    samples, repeats, noise = 50_000, 20, (0.02, 0.02)
    group, number = _group(lognormal(gpu_sigma), count)
    nodes = np.asarray(group.slowest)
    gpus = np.exp(gpu_sigma * rng.standard_normal((samples, count)) - gpu_sigma**2 / 2)
    slowest, lates, shared = gpus.max(axis=1), [], np.ones(samples)
    for cv in noise:
        moments = np.asarray(
            _segment_maxima(jnp.asarray(1.0), jnp.asarray(cv**2), jnp.zeros(()), group, number)
        )
        runs = 1 + cv * rng.standard_normal((repeats, samples, count))
        ends = (gpus * runs).max(axis=2).mean(axis=0)  # Their mean has the covariance of one.
        lates.append(ends - np.interp(slowest, nodes, moments[0]))
        shared = shared * np.interp(slowest, nodes, moments[3])
    products = lates[0] * lates[1]
    error = products.std() / np.sqrt(samples)
    assert abs(products.mean() - shared.mean()) < 4 * error + 0.02 * shared.mean()
    assert shared.mean() > 5 * error  # Or the first would assert nothing.


_RESIDUAL = {"gemm": 0.03, "elementwise": 0.1, "all_gather": 0.2, "send_recv": 0.3}


def _tensor_parallel_step(members):
    """Two stages on two ranks; blocks of 8 segments, each with a collective."""
    gemm, elementwise = Kernel("gemm", "a", 1e-3), Kernel("elementwise", "b", 2e-4)
    gather = Kernel("all_gather", "c", 1e-4, "nvlink")
    forward = ((Segment(((gemm, 2), (elementwise, 3)), gather), 8),)
    backward = (
        (Segment(((gemm, 4), (elementwise, 3)), gather), 7),
        (Segment(((elementwise, 1),)), 1),
    )
    sent = Kernel("send_recv", "d", 5e-4, "network")
    return Step(
        forward=[forward] * 2,
        backward=[backward] * 2,
        send_recv={(0, 1): sent, (1, 0): sent},
        reductions=[()] * 2,
        tail=(),
        orders=[
            ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
            ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"],
        ],
        members=members,
        replicas=2,
        network_links=frozenset(),
    )


def _program(step, gpu_sigma):
    graph, transfer = op_graph(OneFOneB(2, 3)), ((Segment((), step.send_recv[0, 1]), 1),)
    blocks = {"F": step.forward[0], "B": step.backward[0], "SR": transfer}
    variability = Variability(
        residual={kind: lognormal(sigma) for kind, sigma in _RESIDUAL.items()},
        rank=lognormal(gpu_sigma) if gpu_sigma else None,
    )
    return assemble(
        graph,
        [blocks[phase] for phase in graph.phase],
        variability=variability,
        group_size=step.members,
        num_replicas=step.replicas,
    )


@pytest.mark.slow
@pytest.mark.parametrize("members", [4, 16])
@pytest.mark.parametrize("gpu_sigma", [0.0, 0.005, 0.04])
def test_blocks_equal_every_kernel_drawn(gpu_sigma, members):
    """GPUs below the slowest, drawn anew in each segment, made the spread 0.94 of what it is."""
    step = _tensor_parallel_step(members)
    program = _program(step, gpu_sigma)
    law = simulate(program, num_samples=200_000, key=jax.random.key(5), sampling="plain")
    drawn = simulate_steps(step, Laws(_RESIDUAL, gpu_sigma), 160_000 // members, seed=6)
    error = drawn.std() / np.sqrt(len(drawn))
    assert abs(law.mean / drawn.mean() - 1) < 2e-4 + 3 * error / drawn.mean()
    assert law.std == pytest.approx(drawn.std(), rel=0.01 + 3 / np.sqrt(2 * len(drawn)))
    for q in (0.05, 0.5, 0.99):
        density = scipy.stats.norm.pdf(scipy.stats.norm.ppf(q)) / drawn.std()
        noise = 3 * np.sqrt(q * (1 - q) / len(drawn)) / density
        assert abs(law.quantile(q) - np.quantile(drawn, q)) < 5e-4 * law.mean + 1.5 * noise


def test_moments_are_differentiable_down_to_the_gpu():
    @by_numpy
    @jax.value_and_grad
    def skew_sum(parameters):
        mean, variance, third, sigma = parameters
        group, number = _group(lognormal(sigma), 4)
        return jnp.sum(
            segment_maxima(mean, variance, third, group, number)[jnp.array([0, 1, 3]), ::6]
        )

    at = np.array([1.0, 0.02**2, 0.3 * 0.02**3, 0.02])
    _, gradient = skew_sum(at)
    for i, step in enumerate([1e-5, 1e-7, 1e-9, 1e-6]):
        unit = np.zeros(4)
        unit[i] = step
        (above, _), (below, _) = skew_sum(at + unit), skew_sum(at - unit)
        difference = (above - below) / (2 * step)
        assert gradient[i] == pytest.approx(float(difference), rel=1e-4)


@pytest.mark.parametrize("count", [2, 8, 8192])
@pytest.mark.parametrize("cv", [1e-4, 0.01, 0.2])
def test_groups_of_any_size_have_finite_moments_and_derivatives(count, cv):
    single = jnp.asarray([1.0, cv**2, 0.1 * cv**3, count], jnp.float32)
    value, slope = _total_of_moments(jnp.asarray(0.005, jnp.float32), single)
    assert value.dtype == jnp.float32
    assert np.isfinite(value)
    assert slope > 0


@by_numpy
@jax.value_and_grad
def _total_of_moments(sigma, numbers):
    mean, variance, third, count = numbers
    group = _first_group(lognormal(sigma), count[None])
    return segment_maxima(mean, variance, third, group, count).sum()


def test_a_segment_without_noise_has_the_derivative_of_one_with_little():
    group, number = _group(None, 8)

    @by_numpy
    @jax.value_and_grad
    def mean(std):
        return segment_maxima(jnp.asarray(1.0), std**2, jnp.zeros(()), group, number)[0, 0]

    value, slope = mean(jnp.zeros(()))
    assert value == 1.0
    assert np.isfinite(slope)
    # The expected maximum of eight standard normals.
    assert mean(jnp.asarray(1e-4))[1] == pytest.approx(1.42360, rel=1e-3)


def test_constant_kernels_sum_exactly():
    program = _program(_tensor_parallel_step(4), 0.0)
    quiet = eqx.tree_at(
        lambda p: [law.sigma for law in p.variability.residual.values()],
        program,
        [jnp.zeros(())] * 4,
    )
    law = simulate(quiet, num_samples=2000, key=jax.random.key(0), sampling="plain")
    loud = simulate(
        eqx.tree_at(lambda p: p.latencies.mean, quiet, 2 * quiet.latencies.mean),
        num_samples=2000,
        key=jax.random.key(0),
        sampling="plain",
    )
    assert law.std == 0
    assert loud.mean == pytest.approx(2 * law.mean, rel=1e-12)
    assert law.quantile_interval(0.95) == (law.mean, law.mean)
