"""The prototype of pools: picks without replacement, and a step with what it looks at."""

import dataclasses
import itertools as it
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _pool, intervals
from prism_jax.engine import Plain, prepare
from prism_jax.latency import LogNormal
from prism_jax.replica import without_ops

from .helpers import lognormal, one_kernel, pipeline_program


def test_the_slowest_of_a_pool_has_the_chance_of_a_draw_without_replacement():
    """Against all sets of R of n samples: of the slowest, and of the second after each."""
    for n, R in ((7, 1), (7, 3), (6, 6)):
        picks = _pool._equal((n,), (1000,), R, min(2, R))
        sets = list(it.combinations(range(n), R))
        slowest = np.bincount([one[0] for one in sets], minlength=n) / math.comb(n, R)
        reached = (np.asarray(picks.steps) + np.asarray(picks.part)) / 1000
        np.testing.assert_allclose(np.diff(reached, prepend=0), slowest, atol=2e-6)
        for later, first in it.product(picks.later, range(n - R + 1)):
            second = [one[1] for one in sets if one[0] == first]
            beyond = [np.mean(np.array(second) > k) for k in range(first, n)]
            found = np.exp(np.asarray(later)[first:] - later[first])
            np.testing.assert_allclose(found, beyond, atol=1e-5)


def test_steps_take_every_sample_as_often_as_its_chance():
    run = _run(_pipeline(4), 0)
    pool = _pool.draw(run, 0, 64)
    picks = _pool.picks_of(run, pool, 4096, 2)
    steps = _pool.steps_of(
        without_ops(run.plan), run.key, pool, picks, jnp.arange(4096, dtype=jnp.uint32)
    )
    reached = np.asarray(picks.steps) + np.asarray(picks.part)
    taken = np.cumsum(np.bincount(np.asarray(steps.first), minlength=64))
    assert np.abs(taken - reached).max() < 1


def test_one_replica_and_eight_give_the_same_bits_where_reductions_are_constant():
    run = _run(_pipeline(16), 1)
    one, eight = (
        _pool.simulate_pool(run, samples=512, steps=2048, most=most).steps for most in (1, 8)
    )
    np.testing.assert_array_equal(one.times, eight.times)
    np.testing.assert_array_equal(one.sample, eight.sample)


def test_the_host_sorts_as_the_device_does():
    rng = np.random.default_rng(0)
    score = rng.integers(5, size=500).astype(np.float32)
    regime = rng.integers(2, size=500).astype(np.int32)
    found = _pool.order_on_host(score, regime)
    np.testing.assert_array_equal(found, _pool.order_on_device(score, regime))


def test_a_group_that_is_left_out_leaves_its_steps_to_the_next_slowest():
    """The times without a group are never above, and belong to a sample of another group."""
    run = _run(intervals.sinks_that_tie(16), 2)
    steps = _pool.simulate_pool(run, samples=512, steps=1024, most=16).steps
    assert np.all(np.asarray(steps.without) <= np.asarray(steps.times))
    pool = _pool.draw(run, 0, 512)
    group = np.asarray(pool.ids) // 2 % _pool.GROUPS
    decided = np.asarray(steps.group)
    np.testing.assert_array_equal(group[np.asarray(steps.sample)], decided)
    assert np.all(group[np.asarray(steps.other)] != decided)


def test_one_replica_has_the_error_of_independent_steps():
    """Over 32 groups, an error of a mean is known to within an eighth, one standard error."""
    run = _run(_pipeline(1), 3)
    pooled = _pool.simulate_pool(run, samples=4096, steps=4096, most=1)
    times = np.asarray(pooled.steps.times, float)
    error = pooled.moved.scatter(0).error
    assert abs(error / (times.std() / 64) - 1) < 4 / 8


def _run(program, seed: int):
    run = prepare(program, jax.random.key(seed))
    return dataclasses.replace(run, sampling=Plain())


def _pipeline(num_replicas: int):
    """Ranks whose reductions do not vary, and a step factor."""
    from prism_jax.program import Variability
    from prism_jax.schedule import OneFOneB

    laws = {"gemm": lognormal(0.05), "reduce_scatter": LogNormal(jnp.ones(()), jnp.zeros(()))}
    reduction = one_kernel("reduce_scatter", 0.5, "network")
    variability = Variability(residual={**laws}, step=lognormal(0.01))
    options = {"variability": variability, "num_replicas": num_replicas}
    return pipeline_program(OneFOneB(3, 4), reduction=reduction, **options)
