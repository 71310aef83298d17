"""Stalls: how many there are, and of several kinds, each with a size and a rate of its own."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import prism_jax as prism
from prism_jax.latency import AbstractLatency, LogNormal
from prism_jax.program import Stall, Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica import make_plan
from prism_jax.schedule import OneFOneB
from prism_jax.workload import Branches, Kernel, Segment

from .helpers import graph_of, lognormal, pipeline_program


OPS, SIGMA, RATE = 6, 0.01, 2e-3
SIZES, SPREAD = {"attention": 1.0, "gemm": 0.01}, 0.1


def _chain(num_replicas: int) -> prism.Program:
    """Ops of two kinds in turn, one after the other; stalls last 1 s and 0.01 s."""
    ops = [
        prism.Op(0.1, kind="gemm" if i % 2 else "attention", after=[i - 1] if i else [])
        for i in range(OPS)
    ]
    stalls = {
        kind: Stall(jnp.asarray(RATE), LogNormal(jnp.asarray(size), jnp.asarray(SPREAD)))
        for kind, size in SIZES.items()
    }
    law = LogNormal(jnp.asarray(1.0), jnp.asarray(SIGMA))
    residual: dict[str, AbstractLatency] = dict.fromkeys(SIZES, law)
    return prism.compile_graph(
        ops, variability=Variability(residual=residual, stalls=stalls), num_replicas=num_replicas
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 64])
def test_each_kind_of_stall_has_its_own_derivative(num_replicas):
    """One kind costs a hundred times as much as the other; differences of a mean found without the
    library say how much.
    """

    @eqx.filter_grad
    def gradient(program, key):
        return prism.estimate(program, prism.Mean(), num_samples=2**15, key=key)

    program = _chain(num_replicas)
    keys = jax.random.split(jax.random.key(0), 12)
    found = [gradient(program, key).variability.stalls for key in keys]
    for kind, direction in (("attention", np.array([1, 0])), ("gemm", np.array([0, 1]))):
        rates = [float(one[kind].rate) for one in found]
        error = np.std(rates, ddof=1) / np.sqrt(len(rates))
        low, high = (_mean(num_replicas, RATE + sign * 1e-3 * direction) for sign in (-1, 1))
        expected = (high - low) / 2e-3
        assert abs(np.mean(rates) - expected) < 4 * error + 0.003 * expected
        assert error < 0.3 * expected


_COMPUTE = Kernel("gemm", "one", 1.0)
_BESIDE = Branches(((_COMPUTE, 1),), (((Kernel("all_gather", "one", 1.5), 1),),))


@pytest.mark.parametrize(
    ("segment", "rate", "size", "expected"),
    [
        # Collectives beside it hide half a second of each.
        (Segment((), None, (_BESIDE,)), 0.002, 0.8, (0.8 - 0.5) * -np.expm1(-16 * 0.002)),
        (Segment((), None, (_BESIDE,)), 0.002, 0.4, 0.0),
        # Of several at once, the longest counts.
        (Segment(((_COMPUTE, 1),), members=16), 0.02, 0.5, 0.5 * -np.expm1(-16 * 0.02)),
    ],
)
def test_what_waits_hide_of_stalls(segment, rate, size, expected):
    """Of sixteen members, where two stalls of one member are rare."""
    stalls = {"gemm": Stall(jnp.asarray(rate), LogNormal(jnp.asarray(size), jnp.asarray(1e-3)))}
    calm, law = (
        prism.simulate(
            assemble(graph_of([()]), [((segment, 1),)], variability=variability, group_size=16),
            num_samples=2**16,
            key=jax.random.key(0),
        )
        for variability in (Variability(), Variability(stalls=stalls))
    )
    assert law.mean - calm.mean == pytest.approx(expected, rel=0.03, abs=1e-4)
    # The longest delays a step once.
    none = np.exp(-16 * rate)
    spread = expected * np.sqrt(none / (1 - none))
    assert law.std == pytest.approx(spread, rel=0.03, abs=2e-3)


def _mean(num_replicas: int, rates: np.ndarray) -> float:
    """The mean of the slowest of many replicas, of which each kind's stalls are Poisson: as many
    draws for each number of stalls, weighted, so that the same draws serve all rates.
    """
    rng, size, most = np.random.default_rng(0), 100_000, 3
    steps, weights = [], []
    for numbers in itertools.product(range(most + 1), repeat=2):
        step = OPS * 0.1 + 0.1 * SIGMA * np.sqrt(OPS) * rng.standard_normal(size)
        for number, median in zip(numbers, SIZES.values(), strict=True):
            lengths = median * np.exp(SPREAD * rng.standard_normal((number, size)))
            step += lengths.sum(axis=0)
        steps.append(step)
        likely = np.prod(scipy.stats.poisson.pmf(numbers, OPS / 2 * rates))
        weights.append(np.full(size, likely / size))
    steps, weights = np.concatenate(steps), np.concatenate(weights)
    order = np.argsort(steps)
    below = np.minimum(np.cumsum(weights[order]), 1) ** num_replicas
    return float(steps[order] @ np.diff(below, prepend=0))


def _calls(rate) -> prism.Program:
    """Twenty calls, one after the other, whose stalls last 1 s."""
    stalls = {"gemm": Stall(jnp.asarray(rate), lognormal(0.0))}
    return pipeline_program(OneFOneB(1, 10), variability=Variability(stalls=stalls))


def test_stalls_occur_at_their_rate_and_add_their_size():
    """A step of 30 s has 20 calls; half of the samples are of the few steps with stalls."""
    quiet, rate, number = 30.0, 20 * 1e-3, 50_000
    law = prism.simulate(_calls(1e-3), num_samples=number, key=jax.random.key(0))
    assert law.quantile(0.5) == pytest.approx(quiet, rel=1e-6)
    assert law.mean == pytest.approx(quiet + rate, rel=1e-4)
    assert law.effective_samples == pytest.approx(number * np.exp(rate) / 2, rel=0.01)
    # Ranks are stratified, so a probability is right to within about one step of all.
    for stalls in (1, 2):
        expected = scipy.stats.poisson.sf(stalls - 1, rate)
        assert law.exceedance(quiet + stalls - 0.5) == pytest.approx(expected, abs=1.5 / number)


@pytest.mark.parametrize("rate", [0.0, 19.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_number_of_stalls_is_poisson(rate, dtype):
    """With dozens of strata too, whose powers and factorials alone overflow."""
    program = _calls(rate / 20)
    narrow = [x.astype(dtype) if eqx.is_inexact_array(x) else x for x in jax.tree.leaves(program)]
    program = jax.tree.unflatten(jax.tree.structure(program), narrow)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def mean(rate):
        changed = eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, rate)
        counts = make_plan(changed).tables.stall_counts
        return jnp.sum(counts * jnp.arange(len(counts), dtype=counts.dtype)), counts

    (_, counts), slope = mean(program.variability.stalls["gemm"].rate)
    found = np.asarray(counts)
    most = max(stratum.stalls for stratum in program.strata)
    assert not found[most + 1 :].any()
    expected = scipy.stats.poisson.pmf(np.arange(most), rate)
    np.testing.assert_allclose(found[:most], expected, rtol=1e-4, atol=1e-30)
    assert rate < 5 or most > 15
    np.testing.assert_allclose(slope, 20, rtol=1e-3)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-3, 0.03, 1.0])
def test_chances_of_few_stalls_keep_their_digits(rate):
    """In single precision, of the last stratum too, which stands for itself and more; and their
    derivatives, against differences of the law in double precision.
    """
    calls = 20
    single = jnp.asarray(rate / calls, jnp.float32)
    with jax.enable_x64(False):
        program = _calls(single)

        @jax.jit  # Which leaves out all that the chances do not need.
        def chances(rate):
            given = eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, rate)
            return make_plan(given).tables.stall_counts

        counts, derivative = jax.jvp(chances, (single,), (jnp.ones_like(single),))
    most = max(stratum.stalls for stratum in program.strata)
    number = np.arange(most)
    given = calls * float(single)

    def law(rate):
        return np.append(
            scipy.stats.poisson.pmf(number, rate), scipy.stats.poisson.sf(most - 1, rate)
        )

    assert counts.dtype == np.float32
    np.testing.assert_allclose(counts[: most + 1], law(given), rtol=5e-6)
    step = 1e-4 * given
    slope = calls * (law(given + step) - law(given - step)) / (2 * step)
    # That of one stall is zero at a rate of one.
    allowed = 1e-5 * (np.abs(slope) + calls * law(given))
    assert np.all(np.abs(np.asarray(derivative)[: most + 1] - slope) <= allowed)


def test_a_rate_of_stalls_that_was_zero_when_compiled():
    program = _calls(0.0)

    def with_rate(rate):
        return eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, jnp.asarray(rate))

    rare = prism.simulate(
        with_rate(1e-4), num_samples=20_000, key=jax.random.key(0), sampling="plain"
    )
    # Ranks are stratified, so the share of steps with a stall is right to within two steps.
    assert rare.mean == pytest.approx(30 + 20 * 1e-4, abs=2 / 20_000)
    with pytest.raises(ValueError, match="compile it with the new rate"):
        prism.simulate(with_rate(0.05), num_samples=10, key=jax.random.key(0), sampling="plain")
    with pytest.raises(ValueError, match="stall rate of `gemm`"):
        prism.simulate(with_rate(-0.05), num_samples=10, key=jax.random.key(0), sampling="plain")
