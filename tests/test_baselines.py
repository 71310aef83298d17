"""The baselines of `benchmarks/throughput.py` simulate the same law.

Baselines that are not installed are skipped. Their docstrings say how to install them.
"""

import functools as ft
import itertools as it
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from benchmarks._baselines import (
    MEANS,
    by_mc_dagprop,
    by_simpy,
    makespans,
    makespans_in,
    reference_graph,
)


pytestmark = pytest.mark.slow


def _numpy_in_processes(*step) -> np.ndarray:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return makespans_in(pool, *step)


def _mean_and_deviation(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation, and the squares of their standard errors."""
    centred = steps - np.mean(steps, dtype=float)
    variance = np.mean(centred**2)
    of_variance = np.mean(centred**4) - variance**2
    values = np.array([np.mean(steps, dtype=float), np.sqrt(variance)])
    return values, np.array([variance, of_variance / (4 * variance)]) / len(steps)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (4, 2), (4, 4), (8, 32)])
def test_reference_graph_is_1f1b(stages, microbatches):
    graph = reference_graph(stages, microbatches)
    assert graph.num_ops == 2 * stages * microbatches
    assert max(len(before) for before in graph.predecessors) <= 2
    ends: list[float] = []
    for mean, before in zip(graph.means, graph.predecessors, strict=True):
        ends.append(mean + max((ends[p] for p in before), default=0.0))
    assert max(ends) == ends[-1] == (microbatches + stages - 1) * sum(MEANS.values())
    assert set(it.chain(*graph.predecessors)) == set(range(graph.num_ops - 1))


@pytest.mark.parametrize(
    ("library", "simulate", "num_samples"),
    [
        ("numpy", ft.partial(makespans, box_muller=False), 40_000),
        ("numpy", _numpy_in_processes, 100_001),
        ("simpy", by_simpy, 2_000),
        ("mc_dagprop", by_mc_dagprop, 40_000),
    ],
)
@pytest.mark.parametrize(("stages", "microbatches"), [(8, 32), (3, 5)])
def test_agrees_with_numpy(library, simulate, num_samples, stages, microbatches):
    pytest.importorskip(library)
    graph = reference_graph(stages, microbatches)
    steps = simulate(graph, num_samples, 1)
    assert steps.shape == (num_samples,)
    assert steps.dtype == np.float32
    values, squared = _mean_and_deviation(steps)
    expected, expected_squared = _mean_and_deviation(makespans(graph, 100_000, 2))
    assert np.all(np.abs(values - expected) < 5 * np.sqrt(squared + expected_squared))
