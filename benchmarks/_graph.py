"""The reference step, which the engine and every baseline simulate.

It is 1F1B with forwards and backwards only. A forward waits for the forward of the stage before. A
backward waits for the backward of the stage after, or at the last stage for its own forward. Each
op also waits for the op before it on its stage. Durations are independent and log-normal.
"""

import dataclasses


MEANS = {"F": 1.0, "B": 2.0}
"""The mean of an op's duration, in seconds, for each phase."""

SIGMA = 0.05
"""The standard deviation of the logarithm of an op's duration."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """The ops of a step in a topological order, of which the last op ends last.

    **Attributes:**

    - `predecessors`: for each op, the ops that it waits for.
    - `phase`: `F` or `B`.
    - `stage`: the stage that runs the op, one op after the other in the order of the ops.
    """

    predecessors: list[tuple[int, ...]]
    phase: list[str]
    stage: list[int]

    @property
    def num_ops(self) -> int:
        """The number of ops, which is the number of draws in a sample."""
        return len(self.phase)

    @property
    def means(self) -> list[float]:
        """The mean duration of each op."""
        return [MEANS[phase] for phase in self.phase]


def reference_graph(stages: int = 8, microbatches: int = 32) -> Graph:
    """The graph of 1F1B, in which an op waits for at most two others."""
    # Here, so that worker processes and other interpreters can import this module without JAX.
    from prism_jax.schedule import OneFOneB, op_graph

    graph = op_graph(OneFOneB(stages, microbatches))
    sends = {op for op, phase in enumerate(graph.phase) if phase == "SR"}
    ops = [op for op in range(graph.num_ops) if op not in sends]
    new = {op: i for i, op in enumerate(ops)}
    # A send_recv waits for its producer alone; who waits for it waits for the producer.
    for op in sends:
        (producer,) = graph.predecessors[op]
        new[op] = new[producer]
    return Graph(
        predecessors=[tuple(sorted({new[p] for p in graph.predecessors[op]})) for op in ops],
        phase=[str(graph.phase[op]) for op in ops],
        stage=[int(graph.stage[op]) for op in ops],
    )
