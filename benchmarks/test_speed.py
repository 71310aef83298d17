"""The engine's parts, by pytest-benchmark: `pytest benchmarks/test_speed.py`."""

import jax
import pytest

from prism_jax.engine import simulate

from . import _with_engine
from ._graph import reference_graph


_SAMPLES = 200_000


@pytest.fixture(scope="module")
def program():
    return _with_engine.program(reference_graph())


def test_simulate(benchmark, program):
    benchmark(simulate, program, num_samples=_SAMPLES, key=jax.random.key(0))


def test_simulate_many_replicas(benchmark):
    program = _with_engine.program(reference_graph(), 8192)
    benchmark(simulate, program, num_samples=_SAMPLES, key=jax.random.key(0))


@pytest.mark.parametrize("what", ["draws", "value", "value_and_gradient"])
def test_core(benchmark, program, what):
    benchmark(getattr(_with_engine, what), program, _SAMPLES, jax.random.key(0))


@pytest.mark.parametrize("microbatches", [32, 256])
def test_compile_interleaved(benchmark, microbatches):
    benchmark(_with_engine.interleaved, 16, 8, microbatches)
