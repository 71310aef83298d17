"""The vector rule: one replica decides a step, and derivatives go through it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from benchmarks import intervals
from prism_jax import Variability, sensitivity
from prism_jax.analysis import Mean
from prism_jax.engine import Plain, _sampling, prepare, simulated_steps, vector_rule_notes
from prism_jax.engine._pilot import chosen
from prism_jax.engine._reference import reference_steps
from prism_jax.engine._run import all_draws
from prism_jax.replica import sample_replica_ends
from prism_jax.schedule import OneFOneB
from prism_jax.step import Chances, Reservoir, _reservoir, _selection, sample_weights
from prism_jax.step._reservoir import Replicas, resample_factors

from .helpers import lognormal, pipeline_program, rich_program


def test_the_vector_rule_equals_every_replica_where_it_is_accurate():
    program = rich_program(64, schedule=OneFOneB(2, 3))
    steps, number = reference_steps(program, 2_000, 0), 30_000
    found = simulated_steps(program, num_samples=number, key=jax.random.key(2)).steps
    error = 4 * np.std(steps) / np.sqrt(len(steps)) + 1.3e-3 * np.mean(steps)
    assert abs(np.mean(found) - np.mean(steps)) < error
    for q in (0.05, 0.5, 0.95):
        assert abs(np.mean(steps <= np.quantile(found, q)) - q) < 6 * np.sqrt(q * (1 - q) / 2_000)


def test_notes_say_by_how_much_the_vector_rule_is_low():
    program, truth = intervals.sinks_that_tie(64), intervals.truth_of_sinks(64)
    found = simulated_steps(program, num_samples=20_000, key=jax.random.key(0)).steps
    low = 1 - min(np.mean(found) / truth["mean"], np.quantile(found, 0.95) / truth["p95"])
    (note,) = vector_rule_notes(prepare(program, jax.random.key(0)))
    said = float(note.partition("which is ")[2].split()[0]) / 100
    assert low > 0.01
    assert said == pytest.approx(low, rel=0.15)
    assert vector_rule_notes(prepare(rich_program(4), jax.random.key(0))) == ()


@pytest.mark.slow
def test_figures_say_where_they_follow_a_vector_rule_that_is_low():
    program = intervals.sinks_that_tie(64)
    options: dict[str, Any] = {"num_samples": 1_600, "key": jax.random.key(0)}
    for found in (
        sensitivity(program, Mean(), parts=[], **options),
        prism.what_if(program, {"faster": prism.scale_kernel(program, "gemm", 0.9)}, **options),
        prism.criticality(program, **options),
        prism.improve(program, Mean(), {"gemm": 1.0}, 0.5, num_iterations=1, **options),
        prism.target(program, Mean(), "gemm", 1.7, **options),
    ):
        note, *_ = found.notes  # Others say which errors are withheld.
        assert "vector rule" in note
        assert "% low" in note


def test_more_steps_of_many_replicas_are_divided_into_stretches_that_reach_the_tail():
    run = dataclasses.replace(prepare(rich_program(1024), jax.random.key(0)), sampling=Plain())
    for number in (10**6, 10**8, 10**9):
        draws = all_draws(run, number)
        assert sum(draw.steps for draw in draws) == number
        reach = np.sqrt(2 * 1024 * number)
        assert min(draw.steps for draw in draws) > 0.5 * min(reach, number)
    assert len(all_draws(run, 10**8)) > 10


@pytest.mark.parametrize("num_replicas", [1, 16])
def test_a_long_run_is_right_although_most_samples_are_forgotten(num_replicas, monkeypatch):
    """With room for few samples, against the same samples all kept, in NumPy."""
    for room in (_reservoir, _selection):
        monkeypatch.setattr(room, "RESERVOIR", 2_000)
        monkeypatch.setattr(room, "EXTREMES", 1_000)
    monkeypatch.setattr(_sampling, "RESERVOIR", 2_000)
    laws = Variability(residual={"gemm": lognormal(0.2)})
    program = pipeline_program(OneFOneB(2, 3), variability=laws, num_replicas=num_replicas)
    ends = sample_replica_ends(program, jnp.arange(480_000, dtype=jnp.uint32), jax.random.key(99))
    direct = np.max(np.asarray(ends), axis=0).reshape(-1, num_replicas).max(axis=1)
    runs = [simulated_steps(program, num_samples=60_000, key=jax.random.key(s)) for s in range(6)]
    steps = np.array([run.steps for run in runs])
    means = steps.mean(axis=1)
    noise = np.hypot(means.std(ddof=1) / np.sqrt(6), direct.std() / np.sqrt(len(direct)))
    assert abs(means.mean() - direct.mean()) < 4 * noise
    assert steps.std() == pytest.approx(direct.std(), rel=0.03)
    for q in (0.1, 0.5, 0.95):
        expected = float(np.quantile(direct, q))
        assert np.quantile(steps, q) == pytest.approx(expected, abs=0.05 * direct.std())


def test_ties_beyond_the_reservoir_keep_their_weight():
    """Half of two million scores tie, more than the reservoir keeps apart."""
    rng = np.random.default_rng(0)
    reservoir = Reservoir(1, 1, np.float32, 0, 2_000_000)
    for start in range(0, 2_000_000, 100_000):
        score = rng.integers(1, 3, 100_000).astype(np.float32)
        ids = np.arange(start, start + 100_000, dtype=np.uint32)
        ones = np.ones(100_000, np.float32)
        reservoir.add(ids, score[:, None], score, np.zeros(100_000, np.int32), ones)
    kept, one = reservoir.replicas(), np.ones(1)
    assert len(kept.ids) < 500_000
    weights = sample_weights(Chances(np.zeros(1, int), one, one, one), kept)
    assert weights.sum() == pytest.approx(1)
    assert weights[kept.score == 2].sum() == pytest.approx(0.5, abs=0.005)


def test_standard_errors_by_importance_sampling_equal_the_scatter():
    """By importance sampling every other sample is shifted. How many of each there are does not
    scatter: by the bootstrap, the standard error of the probability of a tail is its scatter.
    """
    rng, number, shift = np.random.default_rng(0), 2000, 3.0
    stratum, counts = np.zeros(number, np.int32), np.array([number])
    found, errors = [], []
    for _ in range(600):
        ids = np.arange(number, dtype=np.uint32) + rng.integers(200_000, dtype=np.uint32)
        z = rng.normal(size=number) + shift * (ids % 2)
        likelihood = 1 / (0.5 + 0.5 * np.exp(shift * z - shift**2 / 2))
        kept, slow = Replicas(ids, z[:, None], z, stratum, likelihood, counts), z > shift

        def late(weights, slow=slow):  # That one replica is late, and that one of 64 is.
            tail = weights[slow].sum() / weights.sum()
            return np.array([tail, 1 - (1 - tail) ** 64])

        found.append(late(likelihood))
        again = [late(likelihood * factors) for factors in resample_factors(kept)]
        errors.append(np.std(again, axis=0, ddof=1))
    np.testing.assert_allclose(np.mean(errors, axis=0), np.std(found, axis=0), rtol=0.08)


@pytest.mark.slow
def test_importance_sampling_is_taken_only_where_it_helps():
    num_samples = 20_000
    assert -np.log(0.95) / 64 * num_samples < 20  # So few samples that another way is looked for.

    def p95(program, sampling, seed):
        options: Any = {"num_samples": num_samples, "sampling": sampling}
        return float(prism.simulate(program, key=jax.random.key(seed), **options).quantile(0.95))

    def scatters(program):
        """Of p95, by importance and by plain sampling."""
        for sampling in ("importance", "plain"):
            yield np.std([p95(program, sampling, seed) for seed in range(12)], ddof=1)

    # One rank waits for many independent ops: no direction leads to the tail of their maximum.
    ops = [prism.Op(prism.latency.LogNormal(1.0, 0.2)) for _ in range(64)]
    wide = prism.compile_graph([*ops, prism.Op(0.1, after=range(64))], num_replicas=64)
    assert chosen(prepare(wide, jax.random.key(0)), num_samples).name == "plain"
    importance, plain = scatters(wide)
    assert plain < 0.8 * importance
    # A chain has a direction.
    chain = prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(residual={"gemm": lognormal(0.2)}),
        num_replicas=64,
    )
    assert chosen(prepare(chain, jax.random.key(0)), num_samples).name == "importance"
    importance, plain = scatters(chain)
    assert importance < plain
