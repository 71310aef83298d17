"""The reference step with SimPy, a simulator of discrete events.

One process for each stage runs the ops of the stage in turn. It waits for the events of other
stages that the op needs, then for the op's duration. Then it triggers the op's own event if another
stage needs it. A step is an environment of its own, and its durations are drawn together with
NumPy. For speed, a process does not wait for an event that has been triggered already.

`pip install simpy` installs the library; the benchmark was run with version 4.1.
"""

import numpy as np

from ._graph import SIGMA, Graph


def makespans(graph: Graph, num_samples: int, seed: int) -> np.ndarray:
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
