"""Comparisons of the law of the step time with that under some changes."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.analysis import Quantile
from prism_jax.analysis._jackknife import Jackknifed, combined, jackknifed
from prism_jax.engine import _simulated_steps, prepare, simulated_steps
from prism_jax.engine._pilot import sampled
from prism_jax.engine._pools import pool_draws, pool_of
from prism_jax.latency import AbstractLatency, LogNormal, Mixture
from prism_jax.program import Variability
from prism_jax.schedule import GPipe

from .helpers import lognormal, rich_program


KEY = jax.random.key(5)


def _program(num_replicas: int, spread: float = 0.1) -> prism.Program:
    """A chain."""
    law: AbstractLatency = LogNormal(jnp.asarray(1.0), jnp.asarray(spread))
    ops = [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)]
    return prism.compile_graph(
        ops, variability=Variability(residual={"gemm": law}), num_replicas=num_replicas
    )


@ft.cache
def _replicas() -> np.ndarray:
    """Many draws of one replica."""
    rng, size = np.random.default_rng(0), 2**22
    # Ops keep their mean: the law is around it.
    ops = (0.1 * np.exp(0.1 * rng.standard_normal(size) - 0.1**2 / 2) for _ in range(8))
    return sum(ops, np.zeros(size))


def _quantile(num_replicas: int, level: float) -> float:
    """Of the slowest of many replicas."""
    return float(np.quantile(_replicas(), level ** (1 / num_replicas)))


@pytest.mark.parametrize("num_replicas", [64, 4096])
def test_a_scenario_of_more_replicas_reaches_as_far_as_they_do(num_replicas):
    program = _program(4)
    more = dataclasses.replace(program, num_replicas=num_replicas)
    found = prism.what_if(
        program, {"more": prism.Scenario(more)}, num_samples=2**16, key=KEY
    ).changes["more"]["p95"]
    expected = _quantile(num_replicas, 0.95) - _quantile(4, 0.95)
    low, high = found.interval(0.999)
    assert low < expected < high
    assert high - low < 0.25 * expected


def test_the_value_is_of_all_steps():
    """Not a mean over parts: sixty steps hardly reach beyond p95."""
    program = _program(1)
    found = prism.what_if(program, {}, num_samples=960, key=KEY)
    many = prism.what_if(program, {}, num_samples=96_000, key=KEY)
    error = found.before["p95"].standard_error
    assert abs(found.before["p95"].value - many.before["p95"].value) < 3 * error


def test_a_slow_replica_that_decides_most_steps_lets_them_look_at_no_more_others(monkeypatch):
    """It is the last that a step looks at, and all that there are like it."""
    looks = []

    def recorded(run, samples, number, *others):
        looks.append(number)
        return pool_of(run, samples, number, *others)

    monkeypatch.setattr(_simulated_steps, "pool_of", recorded)
    program = rich_program(16, schedule=GPipe(2, 2), network=None, stalls={})
    slow = prism.slow_rank(program, 1, 2.0)
    unlike = slow.program, 1
    steps = simulated_steps(program, unlike=unlike, num_samples=1024, key=KEY)
    assert np.mean(steps.kind % 2) > 0.99  # Of the other program.
    assert set(looks) == {2}


def test_factors_of_steps_that_programs_have_in_common_cancel_in_the_error_of_a_change():
    """Also where the change lets other samples decide steps."""
    errors = []
    for step in (None, lognormal(0.05)):
        program = rich_program(2, schedule=GPipe(2, 2), network=None, stalls={}, step=step)
        scenarios = {"faster": prism.scale_kernel(program, "gemm", 0.9)}
        found = prism.what_if(program, scenarios, num_samples=4096, key=KEY)
        errors.append(found.changes["faster"]["mean"].standard_error)
    assert errors[1] < 2 * errors[0]


def test_few_steps_of_many_replicas_rest_on_many_samples():
    """Weighted ones, of which there would be eight, are worth less."""
    run = sampled(prepare(_program(64), KEY), 32)
    assert sum(pool.replicas for pool in pool_draws(run, 32)) == 64 * 64


def test_a_quantile_beside_a_gap_lies_where_steps_do():
    # Eight standard errors of the share of long ones from it.
    two = Mixture((0.955, 0.045), tuple(LogNormal(x, 0.001) for x in (1.0, 2.0)))
    program = prism.compile_graph(
        [prism.Op(1.0, kind="gemm")], variability=Variability(residual={"gemm": two})
    )
    simulated = simulated_steps(program, num_samples=2**17, key=KEY)
    p95 = jackknifed(simulated, [Quantile(0.95)])
    near = np.quantile(simulated.steps, [0.949, 0.951])
    assert near[0] < p95.values[0] < near[1]
    assert p95.scatter[0] < near[1] - near[0]


def test_small_changes_of_a_quantile_scatter_as_their_errors_say():
    # They are much smaller than the distance of two steps.
    def p90(seed: int, spread: float) -> Jackknifed:
        program = _program(1, spread)
        simulated = simulated_steps(program, num_samples=8192, key=jax.random.key(seed))
        return jackknifed(simulated, [Quantile(0.9)])

    changes = [combined(np.subtract, p90(seed, 0.102), p90(seed, 0.1)) for seed in range(40)]
    scatter = np.std([change.values[0] for change in changes], ddof=1)
    errors = np.array([change.scatter[0] for change in changes])
    assert 0.7 < scatter / np.sqrt(np.mean(errors**2)) < 1.35
