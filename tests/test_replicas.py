"""Replicas of a step: pools of their samples, and the laws of all of them."""

import functools
import itertools as it
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from benchmarks import intervals
from prism_jax import simulate
from prism_jax.engine import _pools, prepare
from prism_jax.engine._pools import drawn_pools, pool_draws, pool_of, pooled_steps, room_of
from prism_jax.engine._reference import reference_steps
from prism_jax.engine._sampling import Draws
from prism_jax.law import LEVELS, counted, group_sums
from prism_jax.program import Variability
from prism_jax.replica import sample_replica_ends
from prism_jax.schedule import GPipe, OneFOneB
from prism_jax.step import GROUPS, Chances, Pool, Ranks, Room, make_pool, pool_weights, sample_group
from prism_jax.step._pool import picked

from .helpers import lognormal, one_kernel, pipeline_program, rich_program


def _assert_alike(steps: np.ndarray, law: prism.Law) -> None:
    """The mean, the spread and quantiles, within four standard errors of the difference."""
    number = len(steps)
    error = np.hypot(np.std(steps) / np.sqrt(number), law.errors.mean)
    assert abs(np.mean(steps) - law.mean) < 4 * error
    kurtosis = np.mean((steps - np.mean(steps)) ** 4) / np.var(steps) ** 2
    error = np.hypot(np.std(steps) * np.sqrt((kurtosis - 1) / number) / 2, law.errors.std)
    assert abs(np.std(steps) - law.std) < 4 * error
    for q in (0.05, 0.5, 0.95):
        error = np.hypot(np.sqrt(q * (1 - q) / number), law.errors.of_level(q)[0])
        assert abs(np.mean(steps <= law.quantile(q)) - q) < 4 * error


@pytest.mark.parametrize(("num_replicas", "number"), [(1, 8_000), (2, 8_000), (64, 2_000)])
def test_laws_equal_every_replica_of_every_step(num_replicas, number):
    """With all factors and two regimes of the network, and with the weights of stalls, too."""
    for laws in ({"stalls": {}}, {}):
        program = rich_program(num_replicas, schedule=OneFOneB(2, 3), **laws)
        law = simulate(program, num_samples=30_000, key=jax.random.key(1))
        _assert_alike(reference_steps(program, number, 0), law)


def test_importance_samples_give_the_same_law():
    program = rich_program(64, schedule=OneFOneB(2, 3))
    law = simulate(program, num_samples=60_000, key=jax.random.key(1), sampling="importance")
    _assert_alike(reference_steps(program, 2_000, 0), law)
    assert law.effective_samples < 60_000 / 4


@pytest.mark.parametrize("num_replicas", [4, 64])
def test_where_ranks_tie_each_has_its_own_slowest_replica(num_replicas):
    """The slowest replica of all would end a step too early; against the reference and, of other
    sinks, an integral."""
    program = intervals.sinks_that_tie(num_replicas)
    law = simulate(program, num_samples=30_000, key=jax.random.key(1))
    _assert_alike(reference_steps(program, 8_000, 0), law)
    truth = intervals.truth_of_sinks(num_replicas)
    assert abs(law.mean - truth["mean"]) < 4 * law.errors.mean
    assert law.quantile(0.95) == pytest.approx(truth["p95"], rel=2e-3)


def test_with_one_replica_each_sample_is_used_once():
    """With R = 1 and no more than the pipeline, a step is one replica sample, used once."""
    laws = Variability(residual={"gemm": lognormal(0.1)})
    program, samples = pipeline_program(GPipe(2, 4), variability=laws), 20_000
    ends = sample_replica_ends(program, jnp.arange(samples, dtype=jnp.uint32), jax.random.key(5))
    law = simulate(program, num_samples=samples, key=jax.random.key(5))
    direct = np.max(np.asarray(ends), axis=0)
    assert law.mean == pytest.approx(direct.mean(), rel=1e-5)
    assert law.std == pytest.approx(direct.std(), rel=1e-3)
    for q in (0.1, 0.5, 0.9):
        assert law.quantile(q) == pytest.approx(np.quantile(direct, q), abs=0.01 * law.std)


@pytest.mark.parametrize("num_replicas", [1, 16])
def test_a_run_of_several_pools_has_the_law_of_one(num_replicas, monkeypatch):
    laws = Variability(residual={"gemm": lognormal(0.2)})
    program = pipeline_program(OneFOneB(2, 3), variability=laws, num_replicas=num_replicas)
    options = {"num_samples": 64_000, "key": jax.random.key(0)}
    whole = simulate(program, **options)
    monkeypatch.setattr(_pools, "_SAMPLES", 16_000)
    parts = simulate(program, **options)
    assert parts.num_samples == whole.num_samples == 64_000
    # They have the same samples: steps of a pool rest on those of this pool alone.
    assert abs(parts.mean - whole.mean) < 0.5 * whole.errors.mean
    assert parts.errors.mean == pytest.approx(whole.errors.mean, rel=0.5)
    levels = np.array([0.05, 0.5, 0.95])
    for q, share in zip(levels, np.asarray(whole.cdf(parts.quantile(levels))), strict=True):
        assert abs(share - q) < 2 * whole.errors.of_level(q)[0]


@pytest.mark.parametrize(("num_replicas", "steps"), [(4, 100), (1, 1)])
def test_a_program_that_takes_no_time_has_a_law(num_replicas, steps):
    ops = [prism.Op(0.0, rank=0), prism.Op(0.0, rank=1)]
    program = prism.compile_graph(ops, num_replicas=num_replicas)
    law = simulate(program, num_samples=steps, key=jax.random.key(0))
    assert (law.mean, law.std) == (0.0, 0.0)


_ALONE = Chances(np.zeros(1, int), np.ones(1), np.ones(1), np.ones(1))
# A network that is congested once in ten steps, in half of the samples.
_NETWORK = Chances(np.arange(2), np.full(2, 0.5), np.ones(2), np.array([0.9, 0.1]))
# No stall nine times in ten, but in two of five samples only.
_STALLS = Chances(
    np.zeros(2, int), np.array([0.4, 0.6]), np.array([0.9, 0.1]) / [0.4, 0.6], np.ones(1)
)


@functools.partial(jax.jit, static_argnums=3)
def _picked(pool, step_ids, key, dtype):
    number = (step_ids - pool.first_step).astype(jnp.int32)
    return picked(pool, number, step_ids, key, dtype)


def _pool(score, ranks: Ranks, chances=_ALONE, stratum: Any = None, likelihood: Any = None) -> Pool:
    """The pool of replicas with one sink, which ends at the score of each."""
    score = score if isinstance(score, jax.Array) else np.asarray(score, np.float32)
    number = len(score)
    stratum = np.zeros(number, np.int32) if stratum is None else np.asarray(stratum, np.int32)
    likelihoods = np.ones(number, np.float32) if likelihood is None else likelihood
    samples = score[:, None], score, stratum, likelihoods
    by_law, room = likelihood is None, Room(max(number, 1024), 1, max(len(ranks.steps), 1024))
    return make_pool(chances, samples, 0, ranks, room, by_their_law=by_law)


def _shares(pool: Pool, steps: int, n: int) -> np.ndarray:
    """Of how many steps each of the n samples is the slowest."""
    return np.bincount(np.asarray(pool.slowest)[:steps], minlength=n)[:n] / steps


@pytest.mark.parametrize(("n", "R"), [(7, 1), (7, 3), (6, 6)])
def test_the_slowest_of_a_pool_has_the_chance_of_a_draw_without_replacement(n, R):
    """`C(n - k - 1, R - 1) / C(n, R)`, and all sets of R of n samples for the second after each."""
    steps = 10**6
    pool = _pool(range(n, 0, -1), Ranks(range(steps), 0.5, R, 2))
    chance = _shares(pool, steps, n)
    exact = [math.comb(n - k - 1, R - 1) / math.comb(n, R) for k in range(n)]
    np.testing.assert_allclose(chance, exact, atol=2 / steps)
    sets = list(it.combinations(range(n), R))
    for later, first in it.product(np.asarray(pool.later), range(n - R + 1)):
        second = np.array([ranks[1] for ranks in sets if ranks[0] == first])
        beyond = [np.mean(second > k) for k in range(first, n)]
        np.testing.assert_allclose(np.exp(later[first] - later[first:n]), beyond, atol=1e-5)


def test_a_step_can_look_at_many_replicas():
    """At the mean rank of each, `m (n + 1) / (R + 1)`, and half as far again, its chance is still
    that of a draw without replacement, and below what leads to the next regime.
    """
    n, R, looks = 1024, 512, 256
    pool = _pool(
        range(2 * n, 0, -1), Ranks(range(64), 0.5, R, looks), _NETWORK, np.arange(2 * n) % 2
    )
    later = np.asarray(pool.later)[:, : 2 * n].reshape(-1, 2, n)
    for m, (calm, congested) in enumerate(later, 1):
        for k in int(m * (n + 1) / (R + 1)), int(1.5 * m * (n + 1) / (R + 1)):
            expected = -np.log1p(-(R - m) / (n - k))
            assert calm[k] - calm[k - 1] == pytest.approx(expected, abs=1e-3)
        assert calm[-1] < congested[0]


def test_weights_are_picked_by_their_share():
    """With replacement; equal weights are picked as without, to within one over their number."""
    n, R, steps = 1000, 8, 10**6
    likelihood = np.random.default_rng(0).exponential(size=n).astype(np.float32)
    ranks, scores = Ranks(range(steps), 0.5, R, 2), np.arange(n, 0, -1)
    share = np.cumsum(likelihood, dtype=float) / likelihood.sum(dtype=float)
    reached = np.cumsum(_shares(_pool(scores, ranks, likelihood=likelihood), steps, n))
    np.testing.assert_allclose(reached, 1 - (1 - share) ** R, atol=2 / steps)
    equal = _pool(scores, ranks, likelihood=np.ones(n, np.float32)), _pool(scores, ranks)
    by_weight, without = (np.cumsum(_shares(pool, steps, n)) for pool in equal)
    assert 0 < np.abs(by_weight - without).max() < R / n


def test_weights_of_samples_by_hand():
    """Those of a stratum share its probability; regimes of the network do not mix."""
    weights = pool_weights(_STALLS, np.array([0, 1, 1, 0]), np.array([1, 1, 3, 3]))
    np.testing.assert_allclose(weights, [0.9 / 4, 0.1 / 4, 0.1 * 3 / 4, 0.9 * 3 / 4])
    weights = pool_weights(_NETWORK, np.array([0, 1, 1, 0, 0]), np.ones(5))
    np.testing.assert_allclose(weights, [1 / 3, 1 / 2, 1 / 2, 1 / 3, 1 / 3])
    # What was not drawn has no weight.
    np.testing.assert_allclose(pool_weights(_STALLS, np.zeros(3, int), np.ones(3)), [1 / 3] * 3)


def test_pools_are_arranged_alike_on_the_host_and_on_a_device():
    score, stratum = np.random.default_rng(0).random(1000), np.arange(1000) % 2
    ranks, steps = Ranks(range(5000), 0.3, 4, 2), 5000
    on_host = _pool(score, ranks, _NETWORK, stratum)
    on_device = _pool(jnp.asarray(score, jnp.float32), ranks, _NETWORK, stratum)
    for name in ("ends", "ids"):
        arrays = (getattr(pool, name)[:1000] for pool in (on_host, on_device))
        np.testing.assert_array_equal(next(arrays), next(arrays))
    np.testing.assert_array_equal(on_host.later, on_device.later)
    np.testing.assert_array_equal(on_host.slowest[:steps], on_device.slowest[:steps])


@pytest.mark.parametrize("times", [1, 2, 8])
def test_the_share_of_steps_up_to_a_time_is_unbiased(times):
    """At n = R, 2 R and 8 R samples of each regime, of which the second ends a tenth later: over
    400 keys, within four errors of the power of R.
    """
    R, steps, keys, rng = 16, 64, 400, np.random.default_rng(0)
    at, stratum = np.array([0.05, 0.5, 0.95]) ** (1 / R), np.arange(2 * times * R) % 2
    truth = _NETWORK.network @ [at**R, np.maximum(at - 0.1, 0) ** R]
    found, words = np.zeros((keys, 3)), jnp.zeros(2, jnp.uint32)  # The first pick uses no numbers.
    for key in range(keys):
        score, offset = rng.random(len(stratum)) + 0.1 * stratum, rng.random()
        pool = _pool(score, Ranks(range(steps), offset, R, 1), _NETWORK, stratum)
        (first,), _ = _picked(
            pool, jnp.arange(steps, dtype=jnp.uint32), words, np.dtype(np.float32)
        )
        found[key] = (np.asarray(pool.ends)[first] <= at).mean(axis=0)
    error = found.std(axis=0, ddof=1) / np.sqrt(keys)
    assert np.all(np.abs(found.mean(axis=0) - truth) < 4 * error)


def test_pools_of_a_run_have_every_step_and_enough_samples():
    for num_replicas, number in it.product((1, 64, 1024, 65_536), (1, 5_000, 3_000_001)):
        run = prepare(_pipeline(num_replicas), jax.random.key(0))
        draws = pool_draws(run, number)
        first, steps, samples = np.array(draws).T
        assert [*first, number] == [0, *steps.cumsum()]
        room = room_of(run, draws)
        assert min(64 * num_replicas, 2**18) <= samples.min() <= samples.max() <= room.samples
        assert steps.max() <= room.steps <= room.samples <= 2**19


def _decided(run, steps: int, looks: int):
    """A pool of as many samples as steps, and these."""
    (drawn,) = drawn_pools(run, [Draws(0, steps, steps)])
    pool = pool_of(run, drawn, looks, room_of(run, [drawn.draws]))
    return pool, pooled_steps(run, (pool,), steps)


_FACTOR = lognormal(0.01)


def _pipeline(num_replicas: int, step: Any = _FACTOR):
    """Ranks whose reductions do not vary, and a step factor."""
    laws = Variability(residual={"gemm": lognormal(0.05)}, step=step)
    options = {"reduction": one_kernel("reduce_scatter", 0.5, "network"), "variability": laws}
    return pipeline_program(OneFOneB(3, 4), num_replicas=num_replicas, **options)


def test_one_replica_and_eight_give_the_same_bits_where_reductions_are_constant():
    run = prepare(_pipeline(16), jax.random.key(1))
    (pool, one), (_, eight) = (_decided(run, 1024, looks) for looks in (1, 8))
    np.testing.assert_array_equal(one.of("times"), eight.of("times"))
    np.testing.assert_array_equal(one.of("decider"), eight.of("decider"))
    # Every sample is taken as often as its chance.
    np.testing.assert_array_equal(one.of("decider"), pool.slowest[:1024])


def test_without_the_sample_that_decides_a_step_ends_with_the_next_of_its_replicas():
    """At every sink, by NumPy, where all replicas are looked at and steps have no own draws."""
    run = prepare(_pipeline(16, step=None), jax.random.key(2))
    pool, steps = _decided(run, 1024, 16)
    samples, _ = _picked(pool, jnp.arange(1024, dtype=jnp.uint32), run.key, run.plan.dtype)
    ends = np.asarray(pool.ends)[samples][..., : run.program.sinks.number]
    names = "times", "without", "decider", "sink"
    times, without, decider, sink = (np.asarray(steps.of(x)) for x in names)
    reduced = ends.max(axis=2)
    after = times - reduced.max(axis=0)
    np.testing.assert_allclose(after, after[0], rtol=1e-5)
    look = reduced.argmax(axis=0)
    np.testing.assert_array_equal(decider, np.choose(look, samples))
    np.testing.assert_array_equal(sink, ends.max(axis=0).argmax(axis=1))
    left = np.where(look == np.arange(16)[:, None], -np.inf, reduced).max(axis=0)
    np.testing.assert_allclose(without, left + after, rtol=1e-6)


@pytest.mark.parametrize("looks", [1, 2])
def test_a_step_that_looks_at_two_replicas_knows_its_time_without_one(looks):
    """Also where a pool has as many samples as a step has replicas."""
    run = prepare(intervals.sinks_that_tie(16), jax.random.key(2))
    for steps in 16, 4096:
        without = np.asarray(_decided(run, steps, looks)[1].of("without"))
        assert np.isnan(without).all() if looks == 1 else not np.isnan(without).any()


def test_sums_of_groups_are_the_same_by_numpy_and_by_jax():
    """And the same as by loops over blocks of steps next to each other in rank."""
    run = prepare(intervals.sinks_that_tie(16), jax.random.key(2))
    pool, steps = _decided(run, 1025, 2)
    times, without, decider = (np.asarray(steps.of(x)) for x in ("times", "without", "decider"))
    group = sample_group(np.asarray(pool.ids)[decider])
    part = counted(times, 1025, np)
    found: Any = []
    for xp in (np, jnp):
        arrays = map(xp.asarray, (times, without, group))
        arguments: Any = *arrays, part.centre, part.quantiles, (1, GROUPS)
        found.append(group_sums(*arguments, xp=xp))
    for by_numpy, by_jax in zip(*found, strict=True):
        np.testing.assert_allclose(by_numpy, by_jax, rtol=1e-4, atol=1e-5)
    decided, moved = (x[0] for x in found[0])
    assert decided[:, 0].tolist() == np.bincount(group, minlength=GROUPS).tolist()
    np.testing.assert_allclose(decided[:, 3:].sum(axis=0) / 1025, LEVELS, atol=1 / 1025)
    expected = np.zeros(GROUPS)
    for first in range(0, 1025, GROUPS):
        block = slice(first, first + GROUPS)
        step, left = (x[block].astype(float) - part.centre for x in (times, without))
        np.add.at(expected, group[block], step - left.mean())
        share = np.bincount(group[block]) / len(step)
        sets = (np.arange(len(step)) + first // GROUPS) % GROUPS
        np.add.at(expected, sets, np.sqrt(share @ share) * step)
    np.testing.assert_allclose(moved[:, 1], expected, rtol=1e-5, atol=1e-6)
