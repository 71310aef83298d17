"""The baselines simulate the same law: `pytest benchmarks` checks it, `make test` does not run it.

Baselines that are not installed are skipped. Their docstrings say how to install them.
"""

import itertools

import numpy as np
import pytest

from . import _with_mc_dagprop, _with_numpy, _with_simpy
from ._graph import MEANS, Graph, reference_graph


def _simpy(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    pytest.importorskip("simpy", reason="SimPy is not installed.")
    return _with_simpy.makespans(graph, num_samples, seed)


def _mc_dagprop(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    measured = _with_mc_dagprop.measure(graph, num_samples, seed)
    if measured is None:
        pytest.skip("Neither this interpreter nor `MC_DAGPROP_PYTHON` has mc_dagprop.")
    return measured[0]


def _numpy_in_processes(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    with _with_numpy.processes(graph) as pool:
        return _with_numpy.makespans_in(pool, 2, graph, num_samples, seed)


def _ziggurat(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    return _with_numpy.makespans(graph, num_samples, seed, box_muller=False)


def _mean_and_deviation(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation, and the squares of their standard errors."""
    steps = steps.astype(np.float64)
    centred = steps - steps.mean()
    variance = np.mean(centred**2)
    of_variance = np.mean(centred**4) - variance**2
    values = np.array([steps.mean(), np.sqrt(variance)])
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
    assert set(itertools.chain(*graph.predecessors)) == set(range(graph.num_ops - 1))


@pytest.mark.parametrize(
    ("simulate", "num_samples"),
    [(_ziggurat, 40_000), (_numpy_in_processes, 100_001), (_simpy, 2_000), (_mc_dagprop, 40_000)],
)
@pytest.mark.parametrize(("stages", "microbatches"), [(8, 32), (3, 5)])
def test_agrees_with_numpy(simulate, num_samples, stages, microbatches):
    graph = reference_graph(stages, microbatches)
    steps = simulate(graph, num_samples, 1)
    assert steps.shape == (num_samples,)
    assert steps.dtype == np.float32
    values, squared = _mean_and_deviation(steps)
    expected, expected_squared = _mean_and_deviation(_with_numpy.makespans(graph, 100_000, 2))
    assert np.all(np.abs(values - expected) < 5 * np.sqrt(squared + expected_squared))
