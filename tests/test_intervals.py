"""Confidence intervals are as wide as estimates scatter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import prism_jax as prism
from prism_jax.engine import prepare
from prism_jax.engine._draw import all_draws
from prism_jax.latency import AbstractLatency, LogNormal
from prism_jax.program import Variability


def _program(num_replicas: int) -> prism.Program:
    """A chain whose steps vary more by their own factor than by the replica that decides them."""
    law: AbstractLatency = LogNormal(jnp.asarray(1.0), jnp.asarray(0.05))
    return prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(
            residual={"gemm": law}, step=LogNormal(jnp.asarray(1.0), jnp.asarray(0.05))
        ),
        num_replicas=num_replicas,
    )


def test_a_sample_that_decides_many_steps_is_no_atom_where_their_own_draws_spread_them():
    program = _program(64)
    laws = [
        prism.simulate(program, num_samples=4_000, key=jax.random.key(seed), sampling="plain")
        for seed in range(60)
    ]
    # Beyond p95 of the slowest of 64 lie three samples of a replica: that is not enough.
    for level in (0.05, 0.5):
        ends = np.array([law.quantile_interval(level) for law in laws])
        scatter = np.std([float(law.quantile(level)) for law in laws], ddof=1)
        half = np.mean(ends[:, 1] - ends[:, 0]) / 2
        # 1.3 times what the scatter calls for, which 60 laws tell within a fifth; too narrow alike.
        assert 0.7 < half / (1.96 * scatter) < 1.3 * 1.2


def test_more_steps_of_many_replicas_are_divided_into_stretches_that_reach_the_tail():
    run = dataclasses.replace(prepare(_program(1024), jax.random.key(0)), sampling="plain")
    for number in (10**6, 10**8, 10**9):
        draws = all_draws(run, number)
        assert sum(draw.steps for draw in draws) == number
        reach = np.sqrt(2 * 1024 * number)
        assert min(draw.steps for draw in draws) > 0.5 * min(reach, number)
    assert len(all_draws(run, 10**8)) > 10


def test_the_law_is_known_where_few_samples_decide_without_a_step_factor():
    """The grid is set by a pilot drawn as the run is: plainly drawn, it would miss the law."""
    law: AbstractLatency = LogNormal(jnp.asarray(1.0), jnp.asarray(0.1))
    program = prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(residual=dict[str, AbstractLatency](gemm=law)),
        num_replicas=65_536,
    )
    laws = [
        prism.simulate(program, num_samples=100_000, key=jax.random.key(seed), sampling=sampling)
        for seed, sampling in enumerate(("importance", "plain"))
    ]
    median = float(laws[0].quantile(0.5))
    assert np.isfinite(median)
    assert abs(float(laws[0].exceedance(median)) - 0.5) < 0.05
    # One grid for all laws of a program, so that they can be merged.
    assert prism.merge_laws(laws).num_samples == 200_000
