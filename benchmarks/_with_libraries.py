"""The reference step with two libraries, SimPy and mc_dagprop.

SimPy simulates discrete events. One process for each stage runs the ops of the stage in turn. It
waits for the events of other stages that the op needs, then for the op's duration. Then it triggers
the op's own event if another stage needs it. A step is an environment of its own, and its durations
are drawn together with NumPy. For speed, a process does not wait for an event that has been
triggered already. `pip install simpy` installs it; the benchmark was run with version 4.1.

mc_dagprop is a Monte Carlo propagator over event graphs written in C++. An activity is an op. An
event is the end of an op, or the start of the step. An op that waits for several others has the
same activity for each of them, so that it is drawn once. The library has exponential, gamma and
tabulated delays. The nearest to a log-normal is a table: the underlying normal variate takes values
half a unit apart, weighted by its density. This keeps the mean and the variance to six digits. A
finer table would be slower. Version 0.9.1 (`pip install mc_dagprop==0.9.1`) needs Python 3.12 and
NumPy 2.4.
"""

from typing import Any

import numpy as np

from ._graph import MEANS, SIGMA, Graph


BATCH = 64
"""Steps per call of the library, which keeps every event's time of each of them."""

NORMALS = np.linspace(-6, 6, 25)
"""The values of the normal variate in the table."""


def by_simpy(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    """The makespans of `num_samples` steps, one after the other."""
    import simpy

    rng = np.random.default_rng(seed)
    location = np.log(graph.means) - SIGMA**2 / 2
    each = zip(graph.stage, graph.predecessors, strict=True)
    waits = [[p for p in before if graph.stage[p] != stage] for stage, before in each]
    awaited = sorted({p for before in waits for p in before})
    orders = [np.flatnonzero(np.equal(graph.stage, s)).tolist() for s in sorted({*graph.stage})]

    def run_stage(env, order, durations, ended):
        for op in order:
            for p in waits[op]:
                if not ended[p].triggered:
                    yield ended[p]
            yield env.timeout(durations[op])
            if op in ended:
                ended[op].succeed()

    result = np.empty(num_samples, np.float32)
    for i in range(num_samples):
        env = simpy.Environment()
        ended = {op: env.event() for op in awaited}
        durations = rng.lognormal(location, SIGMA).tolist()
        for order in orders:
            env.process(run_stage(env, order, durations, ended))
        env.run()
        result[i] = env.now
    return result


def by_mc_dagprop(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
    """The makespans of `num_samples` steps, on one thread."""
    propagator = _propagator(graph)
    seeds = np.random.default_rng(seed).integers(2**31, size=num_samples).tolist()
    result = np.empty(num_samples, np.float32)
    for begin in range(0, num_samples, BATCH):
        batch = propagator.run_many(seeds[begin : begin + BATCH])
        # A view of the events' times; the library's properties would copy them.
        result[begin : begin + BATCH] = [memoryview(step)[-1] for step in batch]
    return result


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
