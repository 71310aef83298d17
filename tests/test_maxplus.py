import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax import Variability, maxplus, sample_replica_ends
from prism_jax._padding import bucket, pad
from prism_jax.schedule import OneFOneB

from .helpers import event_loop_ends, lognormal, pipeline_program, random_dag, refusal


class _Given(maxplus.AbstractOpLaw):
    given: jax.Array

    def latency(self, op, z, common):
        return self.given + z if common is None else self.given + z + common


def _given(levels, latencies, common=None):
    """With latencies given, and no noise."""
    number, _, fan_in = levels.reads.shape
    room = {"levels": bucket(number, 1024, 4), "fan_in": bucket(fan_in, 2)}

    def zeros(_, pair, arranged):
        return arranged(*[jnp.zeros(pair.shape, latencies.dtype)] * 2)

    return pad(levels, room, latencies.dtype), maxplus.Latencies(
        tables=_Given(latencies),
        rows=_Given(jnp.asarray(levels.nodes)),
        common=common,
        noise=zeros,
        noise_arguments=None,
    )


def _ends_of_sinks(levels, latencies):
    ends = maxplus.propagate(*_given(levels, latencies), latencies.shape[1], latencies.dtype)
    return ends[: len(levels.sinks)]


def _random_dags(number):
    """Random graphs side by side, for each of another size would compile; and the ops of each."""
    predecessors, members = [], []
    for seed in range(number):
        first = len(predecessors)
        dag = random_dag(seed)
        predecessors += [tuple(first + p for p in before) for before in dag]
        members.append(tuple(range(first, len(predecessors))))
    return predecessors, members


@pytest.mark.parametrize("width", [None, 1, 3])
def test_each_op_has_noise_of_its_own(width):
    predecessors, members = _random_dags(8)
    levels = maxplus.to_levels(predecessors, members, width)
    levels, latencies = _given(levels, jnp.zeros((len(predecessors), 1)))

    def numbered(_, pair, arranged):
        return arranged(2.0 * pair.astype(float), 2.0 * pair.astype(float) + 1)

    latencies = dataclasses.replace(latencies, noise=numbered)
    numbers = np.asarray(maxplus.cell_latencies(levels, latencies, 1, np.dtype(float)))
    numbers = numbers[np.ravel(levels.ops) >= 0]
    assert len(np.unique(numbers)) == len(predecessors)


@pytest.mark.parametrize("width", [None, 1, 3])
def test_equals_an_event_loop_exactly(width):
    predecessors, members = _random_dags(8)
    rng = np.random.default_rng(0)
    latencies = rng.exponential(size=(len(predecessors), 3))
    latencies[rng.random(latencies.shape) < 0.1] = 0.0
    sinks = [(5, 11), *((ops[-1],) for ops in members), *members]
    levels = maxplus.to_levels(predecessors, sinks, width)
    ends = maxplus.op_ends(levels, latencies)[: len(predecessors)]
    found = _ends_of_sinks(levels, jnp.asarray(latencies))
    for sample in range(latencies.shape[1]):
        expected = np.array(event_loop_ends(predecessors, list(latencies[:, sample])))
        assert np.array_equal(ends[:, sample], expected)
        assert np.array_equal(found[:, sample], [expected[list(s)].max() for s in sinks])


def ends_and_criticality(levels, latencies, weights: float | np.ndarray = 1.0):
    """The ends of sinks, and the derivative of their weighted sum with respect to the latencies."""

    def total(latencies, weights):
        ends = _ends_of_sinks(levels, latencies)
        return jnp.sum(jnp.sum(ends, axis=1) * weights), ends

    run = jax.jit(jax.grad(total, has_aux=True))
    criticality, ends = run(jnp.asarray(latencies), weights)
    return np.asarray(ends), np.asarray(criticality)


def test_eulers_identity_and_bounds_hold_exactly():
    """The makespan is homogeneous of degree one, so it is the sum of latency times derivative;
    integers and ties make it exact."""
    predecessors, members = _random_dags(5)
    latencies = np.random.default_rng(0).integers(0, 4, (len(predecessors), 2)).astype(float)
    levels = maxplus.to_levels(predecessors, members)
    ends, criticality = ends_and_criticality(levels, latencies)
    assert np.all((criticality >= 0) & (criticality <= 1))
    weighed = np.asarray(latencies * criticality)
    for end, ops in zip(np.asarray(ends), map(list, members), strict=True):
        np.testing.assert_allclose(weighed[ops].sum(axis=0), end, rtol=1e-14)
        assert np.all(latencies[ops].max(axis=0) <= end)
        assert np.all(end <= latencies[ops].sum(axis=0))
    assert np.array_equal(ends_and_criticality(levels, 2 * latencies)[0], 2 * ends)
    sinks = [np.full(2, sink) for sink in range(len(members))]
    on_paths = [
        maxplus.critical_ops(levels, maxplus.op_ends(levels, latencies), sink) for sink in sinks
    ]
    assert np.array_equal(criticality, np.sum(on_paths, axis=0))


def test_weights_of_several_figures_share_the_path_to_a_sink_of_each_sample():
    """Integers and ties make it exact."""
    predecessors, members = _random_dags(5)
    rng = np.random.default_rng(0)
    latencies = rng.integers(0, 4, (len(predecessors), 3)).astype(float)
    sinks, weights = np.array([4, 0, 2]), rng.integers(-3, 4, (4, 3)).astype(float)
    levels, at = maxplus.to_levels(predecessors, members), jnp.asarray(sinks)

    def ends(latencies, common):
        return maxplus.propagate_to(*_given(levels, latencies, common), at, latencies.dtype)

    found, vjp = jax.vjp(ends, jnp.asarray(latencies), jnp.zeros((1, 1)))
    of_latencies, of_common = jax.vmap(vjp)(jnp.asarray(weights))
    every = np.asarray(_ends_of_sinks(levels, jnp.asarray(latencies)))
    assert np.array_equal(found, every[sinks, range(3)])
    on_path = maxplus.critical_ops(levels, maxplus.op_ends(levels, latencies), sinks)
    assert np.array_equal(of_latencies, weights[:, None, :] * on_path)
    assert np.array_equal(of_common[:, 0, 0], weights @ on_path.sum(axis=0))


def test_ends_and_derivatives_of_more_levels_than_one_sum():
    """Of more levels than 1024; integers make it exact."""
    rng, number = np.random.default_rng(0), 3_000
    predecessors = [tuple({max(i - 3, 0), max(i - 1 - i % 2, 0)} - {i}) for i in range(number)]
    latencies = rng.integers(0, 5, (number, 2)).astype(float)
    levels = maxplus.to_levels(predecessors, [(number - 1,), (5,)])
    assert len(levels.ops) > 1024

    ends, criticality = ends_and_criticality(levels, latencies, np.array([1.0, 0.0]))
    for sample in range(2):
        expected = event_loop_ends(predecessors, list(latencies[:, sample]))
        assert ends[:, sample].tolist() == [expected[-1], expected[5]]
    assert np.all((criticality == 0) | (criticality == 1))
    assert np.array_equal((latencies * criticality).sum(axis=0), ends[0])


def test_levels_hold_every_op_once_and_reuse_slots():
    predecessors = [()] + [(op,) for op in range(99)]
    levels = maxplus.to_levels(predecessors, [(99,)])
    ops = levels.ops
    assert sorted(ops[ops >= 0]) == list(range(100))
    assert levels.num_slots <= 4


def test_an_op_that_waits_for_a_later_one_is_refused():
    refusal(lambda: maxplus.to_levels([(1,), ()], [(1,)]), "Op 0 waits for [1]; number the ops")


def test_long_sums_do_not_drift():
    """Of equal latencies in single precision, beside a path that has ended long before."""
    number, few = 300_000, 3
    chain = [() if i == 0 else (i - 1,) for i in range(number)]
    short = [() if i == 0 else (number + i - 1,) for i in range(few)]
    levels = maxplus.to_levels(chain + short, [(number - 1,), (number + few - 1,)])
    latency = np.float32(0.1)
    ends = _ends_of_sinks(levels, jnp.full((number + few, 1), latency))
    # An addition errs by at most half an ulp of 1024 latencies, or of the whole for one in 1024.
    assert float(ends[0, 0]) == pytest.approx(number * float(latency), rel=5e-5)
    assert float(ends[1, 0]) == pytest.approx(
        few * float(latency), abs=float(np.spacing(ends[0, 0]))
    )


@pytest.mark.slow
def test_the_core_is_differentiable_under_jit_and_vmap():
    """The hand-written rule, mapped over keys and parameters, equals a loop."""
    variability = Variability(
        residual={"gemm": lognormal(0.05), "send_recv": lognormal(0.3)}, rank=lognormal(0.02)
    )
    program = pipeline_program(OneFOneB(3, 6), variability=variability)
    ids = jnp.arange(64, dtype=jnp.uint32)

    @jax.jit
    def gradient(sigma, key):
        def mean(sigma):
            changed = eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, sigma)
            ends = sample_replica_ends(changed, ids, key)
            # Every rank has a cotangent: several paths for each sample.
            return jnp.mean(jnp.sum(ends, axis=0))

        return jax.grad(mean)(sigma)

    keys, sigmas = jax.random.split(jax.random.key(0), 3), jnp.array([0.02, 0.05, 0.1])
    mapped = jax.vmap(gradient)(sigmas, keys)
    looped = [gradient(s, k) for s, k in zip(sigmas, keys, strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(looped), rtol=1e-10)

    def value(sigma):
        changed = eqx.tree_at(lambda p: p.variability.residual["gemm"].sigma, program, sigma)
        return float(jnp.mean(jnp.sum(sample_replica_ends(changed, ids, keys[0]), axis=0)))

    step = 1e-6
    difference = (value(sigmas[0] + step) - value(sigmas[0] - step)) / (2 * step)
    assert float(mapped[0]) == pytest.approx(difference, rel=1e-5)
