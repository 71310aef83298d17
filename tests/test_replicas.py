"""Laws of steps of many replicas, against every replica of every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from benchmarks import intervals
from prism_jax import Variability, simulate
from prism_jax.engine import _pools
from prism_jax.engine._reference import reference_steps
from prism_jax.replica import sample_replica_ends
from prism_jax.schedule import GPipe, OneFOneB

from .helpers import lognormal, pipeline_program, rich_program


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


def test_a_program_that_takes_no_time_has_a_law():
    ops = [prism.Op(0.0, rank=0), prism.Op(0.0, rank=1)]
    program = prism.compile_graph(ops, num_replicas=4)
    law = simulate(program, num_samples=100, key=jax.random.key(0))
    assert (law.mean, law.std) == (0.0, 0.0)
    more = simulate(
        dataclasses.replace(program, num_replicas=1), num_samples=1, key=jax.random.key(0)
    )
    assert more.mean == 0.0
