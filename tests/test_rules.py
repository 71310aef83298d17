"""Which rule finds the slowest of the replicas, and which way samples are drawn, by itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax import Variability, merge_laws, sensitivity, simulate
from prism_jax.analysis import Mean
from prism_jax.engine import prepare, vector_rule_notes
from prism_jax.engine._pilot import draw_pilot
from prism_jax.latency import AbstractLatency
from prism_jax.lowering._sinks import Sink
from prism_jax.program import Network
from prism_jax.program._assemble import assemble
from prism_jax.schedule import OneFOneB
from prism_jax.step import ExactRule, VectorRule, decide

from .helpers import (
    claimed_over_scatter,
    graph_of,
    lognormal,
    one_kernel,
    pipeline_program,
    rich_program,
)


def _tied(num_replicas=64):
    """Four ranks that end alike, and reductions that vary as much as they do."""
    residual: dict[str, AbstractLatency] = {
        "gemm": lognormal(0.1),
        "reduce_scatter": lognormal(0.5),
    }
    return assemble(
        graph_of([()] * 4, rank=[0, 1, 2, 3]),
        [one_kernel("gemm", 10.0)] * 4,
        variability=Variability(residual=residual),
        num_replicas=num_replicas,
        sinks=[Sink(r, (r,), one_kernel("reduce_scatter", 3.0, "network")) for r in range(4)],
    )


def _decided(program) -> ExactRule:
    """The exact rule on a pilot's replicas."""
    pilot = draw_pilot(prepare(program, jax.random.key(0)))
    kept, run = pilot.chunk.decision.kept, pilot.run
    number = program.num_replicas
    exact = decide(run.chances, kept, run.key, 4096, num_replicas=number, exact=True)
    assert isinstance(exact, ExactRule)
    return exact


def test_where_ranks_tie_the_exact_rule_is_taken():
    program = _tied()
    explicit = simulate(program, num_samples=30_000, key=jax.random.key(1), replicas="explicit")
    vector = simulate(program, num_samples=60_000, key=jax.random.key(2), replicas="vector")
    found = simulate(program, num_samples=60_000, key=jax.random.key(2))
    assert (found.replicas, vector.replicas, explicit.replicas) == ("exact", "vector", "explicit")
    assert "replicas: exact" in repr(found)
    for figure in (lambda law: law.mean, lambda law: law.quantile(0.95)):
        assert figure(found) == pytest.approx(figure(explicit), rel=3e-3)
        assert figure(vector) < 0.97 * figure(explicit)
    # The tolerance is more than three standard errors of the difference.
    assert 3 * np.hypot(found.errors.mean, explicit.errors.mean) < 3e-3 * explicit.mean
    assert abs(found.mean - explicit.mean) < 4 * np.hypot(found.errors.mean, explicit.errors.mean)


@pytest.mark.parametrize(
    "program",
    [
        pipeline_program(OneFOneB(4, 6), num_replicas=64),
        pytest.param(rich_program(64), marks=pytest.mark.slow),
        dataclasses.replace(_tied(), num_replicas=1),
    ],
    ids=["pipeline", "rich", "one replica"],
)
def test_elsewhere_the_vector_rule_is_kept(program):
    options: dict[str, Any] = {"num_samples": 4_000, "key": jax.random.key(0)}
    found = simulate(program, **options)
    assert found.replicas == "vector"
    assert found == simulate(program, replicas="vector", **options)


def test_the_rule_of_replicas_does_not_depend_on_the_key():
    laws = [simulate(_tied(), num_samples=2_000, key=jax.random.key(k)) for k in range(2)]
    assert merge_laws(laws).replicas == "exact"
    other = simulate(_tied(), num_samples=2_000, key=jax.random.key(2), replicas="vector")
    assert merge_laws([*laws, other]).replicas == "mixed"


@pytest.mark.parametrize(
    "program",
    [_tied(), pytest.param(rich_program(64), marks=pytest.mark.slow)],
    ids=["tied", "rich"],
)
def test_both_rules_decide_the_same_replicas(program):
    """The slowest of those that the exact rule draws is decisive by the vector rule: its law is the
    vector rule's, and none of its ranks ends after the slowest of that rank."""
    exact = _decided(program)
    slowest = dataclasses.replace(exact, one_decides=True)
    low, high = slowest.ends(0, 4096), exact.ends(0, 4096)
    assert np.all(low <= high)
    assert np.any(low < high)
    np.testing.assert_allclose(low.max(axis=1), high.max(axis=1), rtol=0.02)
    run = draw_pilot(prepare(program, jax.random.key(0))).run
    vector = decide(run.chances, exact.kept, run.key, 4096, num_replicas=64)
    assert isinstance(vector, VectorRule)
    found, expected = (one.ends(0, 4096).max(axis=1) for one in (slowest, vector))
    noise = np.std(found) / np.sqrt(4096)
    assert found.mean() == pytest.approx(expected.mean(), abs=4 * noise)


@pytest.mark.slow
@pytest.mark.parametrize("program", [_tied(), _tied(4)], ids=["many", "few"])
def test_intervals_of_the_exact_rule_are_as_wide_as_repetitions_scatter(program):
    laws = [
        simulate(program, num_samples=4_000, key=jax.random.key(s), replicas="exact")
        for s in range(60)
    ]
    for ratio in claimed_over_scatter(laws).values():
        assert 0.7 < ratio < 1.4  # Sixty runs tell it within a quarter.


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["vector", "exact"])
def test_std_interval_width_with_rare_network_regime(replicas):
    """How many steps the network is slow in is set; intervals of std were up to 6 times as wide."""
    program = pipeline_program(
        OneFOneB(2, 4),
        send_recv=0.5,
        variability=Variability(
            residual=dict[str, AbstractLatency](gemm=lognormal(0.05)),
            network=Network(jnp.asarray(0.02), jnp.asarray(3.0)),
        ),
        num_replicas=64,
        network_links=("network",),
    )
    options: dict[str, Any] = {"num_samples": 4_000, "sampling": "plain", "replicas": replicas}
    laws = [simulate(program, key=jax.random.key(seed), **options) for seed in range(40)]
    scatter = np.std([law.std for law in laws], ddof=1)
    half = np.mean([np.diff(law.std_interval())[0] for law in laws]) / 2
    assert 0.6 < half / (1.96 * scatter) < 1.3 * 1.25  # Which 40 laws tell within a quarter.


def test_a_program_that_takes_no_time_has_a_law():
    ops = [prism.Op(0.0, rank=0), prism.Op(0.0, rank=1)]
    program = prism.compile_graph(ops, num_replicas=4)
    law = simulate(program, num_samples=100, key=jax.random.key(0))
    assert (law.mean, law.replicas) == (0.0, "vector")


@pytest.mark.slow
def test_the_exact_rule_takes_weighted_samples():
    program = _tied(16)
    explicit = simulate(program, num_samples=30_000, key=jax.random.key(1), replicas="explicit")
    found = simulate(program, num_samples=60_000, key=jax.random.key(2), sampling="importance")
    assert (found.replicas, found.sampling) == ("exact", "importance")
    noise = np.hypot(found.errors.mean, explicit.errors.mean)
    assert abs(found.mean - explicit.mean) < 4 * noise
    assert 4 * noise < 0.01 * explicit.mean


@pytest.mark.slow
def test_figures_say_where_they_follow_a_vector_rule_that_is_low():
    program = _tied()
    options: dict[str, Any] = {"num_samples": 1_600, "key": jax.random.key(0)}
    for found in (
        sensitivity(program, Mean(), parts=[], **options),
        prism.what_if(program, {"faster": prism.scale_kernel(program, "gemm", 0.9)}, **options),
        prism.criticality(program, **options),
        prism.improve(program, Mean(), {"gemm": 1.0}, 0.5, num_iterations=1, **options),
        prism.target(program, Mean(), "gemm", 16.0, **options),
    ):
        note, *_ = found.notes  # Others say which errors are withheld.
        assert "vector rule" in note
        assert "% low" in note
    assert vector_rule_notes(prepare(rich_program(4), jax.random.key(0))) == ()


def _side_by_side(number, num_replicas):
    """One rank waits for many independent ops: no direction leads to the tail of their maximum."""
    work = prism.latency.LogNormal(1.0, 0.2)
    ops = [prism.Op(work) for _ in range(number)]
    last = prism.Op(0.1, after=range(number))
    return prism.compile_graph([*ops, last], num_replicas=num_replicas)


@pytest.mark.slow
def test_importance_sampling_is_taken_only_where_it_helps():
    num_samples = 20_000
    beyond = -np.log(0.95) / 64 * num_samples
    assert beyond < 20  # So few plain samples that another way is looked for.

    def scatter(program, **how):
        keys = map(jax.random.key, range(12))
        laws = [simulate(program, num_samples=num_samples, key=k, **how) for k in keys]
        return laws[0].sampling, np.std([float(law.quantile(0.95)) for law in laws], ddof=1)

    wide = _side_by_side(64, 64)
    sampling, by_itself = scatter(wide)
    _, importance = scatter(wide, sampling="importance")
    _, plain = scatter(wide, sampling="plain")
    assert sampling == "plain"
    assert by_itself <= plain < 0.8 * importance
    # A chain has a direction.
    chain = prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(residual={"gemm": lognormal(0.2)}),
        num_replicas=64,
    )
    sampling, by_itself = scatter(chain)
    _, plain = scatter(chain, sampling="plain")
    assert sampling == "importance"
    assert by_itself < plain
