"""What every replica of every step gives, against the fast ways to simulate."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import prism_jax as prism
from prism_jax.engine._reference import reference_steps
from prism_jax.latency import Gamma, LogNormal
from prism_jax.program import Network, Sets, Stall, Variability
from prism_jax.schedule import OneFOneB

from .helpers import lognormal, pipeline_program


_STEPS, _SCHEDULE = 8_000, OneFOneB(3, 6)
_JOB = pathlib.Path(__file__).parents[1] / "examples/job.toml"
_FACTORS = ("rank", "step", "worker_step", "microbatch", "network")


def _program(num_replicas: int, *, schedule=_SCHEDULE, **laws) -> prism.Program:
    everything = {
        "residual": {"gemm": lognormal(0.05), "send_recv": Gamma(1.0, 0.3)},
        "rank": lognormal(0.02),
        "step": lognormal(0.01),
        "worker_step": lognormal(0.01),
        "microbatch": Gamma(1.0, 0.05),
        "network": Network(jnp.asarray(0.1), jnp.asarray(1.5)),
        "stalls": {"gemm": Stall(jnp.asarray(0.002), LogNormal(0.5, 0.5))},
    }
    variability = Variability(**{**everything, **laws})
    return pipeline_program(schedule, variability=variability, num_replicas=num_replicas)


def _alike(steps: np.ndarray, law: prism.Law) -> None:
    """Of the mean, the spread and quantiles, within four standard errors."""
    number = len(steps)
    error = np.hypot(np.std(steps) / np.sqrt(number), law.errors.mean)
    assert abs(np.mean(steps) - law.mean) < 4 * error
    kurtosis = np.mean((steps - np.mean(steps)) ** 4) / np.var(steps) ** 2
    error = np.hypot(np.std(steps) * np.sqrt((kurtosis - 1) / number) / 2, law.errors.std)
    assert abs(np.std(steps) - law.std) < 4 * error
    for q in (0.05, 0.5, 0.95, 0.99):
        error = np.sqrt(2 * q * (1 - q) / number)  # The law has as many steps or more.
        assert abs(np.mean(steps <= law.quantile(q)) - q) < 4 * error


def test_all_factors_stalls_and_the_network_together():
    program = _program(4)
    law = prism.simulate(program, num_samples=_STEPS, key=jax.random.key(1))
    _alike(reference_steps(program, _STEPS, 0), law)


def test_sets_of_microbatches():
    factors = np.random.default_rng(0).uniform(0.8, 1.3, (5, 9))
    program = _program(1, microbatch=Sets(jnp.asarray(factors), 4))
    law = prism.simulate(program, num_samples=_STEPS, key=jax.random.key(1), sampling="plain")
    _alike(reference_steps(program, _STEPS, 0), law)


def test_collapsed_blocks_reductions_on_the_way_and_a_tail():
    """A small job with two replicas of it, its GPUs as they differ."""
    program = prism.compile_job(prism.load_job(_JOB))
    assert len(program.sinks.rank) > program.num_ranks
    assert program.tail >= 0
    program = dataclasses.replace(program, num_replicas=2)
    law = prism.simulate(program, num_samples=_STEPS, key=jax.random.key(1))
    _alike(reference_steps(program, 1_000, 0), law)


def test_a_law_over_allocations():
    """Of the means of runs, each on its own GPUs: their spread between the runs."""
    program = _program(2, schedule=OneFOneB(2, 3), rank=lognormal(0.1))
    runs, steps = 40, 40
    law: Any = prism.simulate(
        program, num_samples=runs * steps, key=jax.random.key(1), allocations=runs
    )
    means = [np.mean(reference_steps(program, steps, k, same_gpus=True)) for k in range(runs)]
    ratio = np.std(means) / np.std(law.allocations.means)
    assert abs(np.log(ratio)) < 4 / np.sqrt(runs)
    error = np.hypot(np.std(means), np.std(law.allocations.means)) / np.sqrt(runs)
    assert abs(np.mean(means) - law.mean) < 4 * error


def test_reference_steps_without_variance_equal_the_step():
    program = _program(2, residual={}, stalls={}, **dict.fromkeys(_FACTORS))
    law = prism.simulate(program, num_samples=16, key=jax.random.key(1), sampling="plain")
    np.testing.assert_allclose(reference_steps(program, 3, 0), law.mean, rtol=1e-12)
