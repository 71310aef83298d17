"""The reference step with `mc_dagprop`, a Monte Carlo propagator over event graphs written in C++.

An activity is an op. An event is the end of an op, or the start of the step. An op that waits for
several others has the same activity for each of them, so that it is drawn once.

The library has exponential, gamma and tabulated delays. The nearest to a log-normal is a table:
the underlying normal variate takes values half a unit apart, weighted by its density. This keeps
the mean and the variance to six digits. A finer table would be slower.

Version 0.9.1 needs Python 3.12 and NumPy 2.4, and ships compiled:

    python3.12 -m venv mc_dagprop_venv
    mc_dagprop_venv/bin/pip install mc_dagprop==0.9.1

If another interpreter runs the benchmark, set the environment variable
`MC_DAGPROP_PYTHON=mc_dagprop_venv/bin/python`. The benchmark sends the graph to that interpreter,
which returns the makespans and the time on its own clock. So neither its start nor the transfer
counts.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np

from ._graph import MEANS, SIGMA, Graph


BATCH = 64
"""Steps per call of the library, which keeps every event's time of each of them."""

NORMALS = np.linspace(-6, 6, 25)
"""The values of the normal variate in the table."""


def makespans(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    """The makespans of `num_samples` steps, on one thread of this interpreter."""
    propagator = _propagator(graph)
    seeds = np.random.default_rng(seed).integers(2**31, size=num_samples).tolist()
    result = np.empty(num_samples, np.float32)
    for begin in range(0, num_samples, BATCH):
        batch = propagator.run_many(seeds[begin : begin + BATCH])
        # A view of the events' times; the library's properties would copy them.
        result[begin : begin + BATCH] = [memoryview(step)[-1] for step in batch]
    return result


def measure(
    graph: Graph, num_samples: int, seed: int, python: str | None = None
) -> tuple[np.ndarray, float] | None:
    """The makespans and the seconds that they took, or nothing where the library is missing.

    **Arguments:**

    - `graph`, `num_samples`, `seed`: as for `makespans`.
    - `python`: an interpreter that has the library, for when this one does not. Default the
        environment variable `MC_DAGPROP_PYTHON`.
    """
    if importlib.util.find_spec("mc_dagprop") is not None:
        return _measure_here(graph, num_samples, seed)
    python = python or os.environ.get("MC_DAGPROP_PYTHON")
    if not python:
        return None
    done = subprocess.run(
        [python, "-m", __name__],
        input=json.dumps([dataclasses.asdict(graph), num_samples, seed]),
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    steps, seconds = json.loads(done.stdout)
    return np.array(steps, np.float32), seconds


def _measure_here(graph: Graph, num_samples: int, seed: int) -> tuple[np.ndarray, float]:
    makespans(graph, BATCH, seed)
    begin = time.perf_counter()
    steps = makespans(graph, num_samples, seed)
    return steps, time.perf_counter() - begin


def _propagator(graph: Graph) -> Any:
    import mc_dagprop

    generator = mc_dagprop.GenericDelayGenerator()
    phases = list(MEANS)
    factors = np.exp(SIGMA * NORMALS - SIGMA**2 / 2)
    weights = np.exp(-(NORMALS**2) / 2).tolist()
    for kind, mean in enumerate(MEANS.values()):
        generator.add_empirical_absolute(kind, (mean * factors).tolist(), weights)
    activities = {}
    precedence = []
    # Event 0 is the start of the step, so the end of op `i` is event `i + 1`.
    for op, before in enumerate(graph.predecessors):
        sources = [p + 1 for p in before] or [0]
        kind = phases.index(graph.phase[op])
        activities[sources[0], op + 1] = mc_dagprop.Activity(op, 0.0, kind)
        precedence.append((op + 1, [(source, op) for source in sources]))
    at_start = mc_dagprop.EventTimestamp(0.0, 0.0, 0.0)
    events = [mc_dagprop.Event(str(i), at_start) for i in range(graph.num_ops + 1)]
    context = mc_dagprop.DagContext(events, activities, precedence, float("inf"))
    return mc_dagprop.MonteCarloPropagator(context, generator)


def _answer() -> None:
    """Measures what standard input asks for, and writes the answer to standard output."""
    graph, num_samples, seed = json.load(sys.stdin)
    steps, seconds = _measure_here(Graph(**graph), num_samples, seed)
    json.dump([steps.tolist(), seconds], sys.stdout)


if __name__ == "__main__":
    _answer()
