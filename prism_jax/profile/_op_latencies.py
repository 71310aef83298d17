"""The latencies of the ops of a trace, and replays of its steps."""

import numpy as np
from jaxtyping import Float

from ..schedule import SEND_RECV, replay as replay_graph
from ..trace import Trace
from ._step_graph import LAUNCH, StepGraph


def op_latencies(trace: Trace, step: StepGraph) -> Float[np.ndarray, "ops steps"]:
    """The latency of each op in each step, from the end of the last op that it waited for, in
    seconds.

    So it contains neither the waits of workers nor, for collectives, the waits for other members.
    """
    ends = _recorded_ends(trace, step)
    latencies = np.empty_like(ends)
    for op, before in enumerate(step.graph.predecessors):
        ready = ends[list(before)].max(axis=0) if before else 0.0
        latencies[op] = ends[op] - ready
    return np.maximum(latencies, 0)


def _recorded_ends(trace: Trace, step: StepGraph) -> Float[np.ndarray, "ops steps"]:
    pp = trace.job.layout.pp
    lowest = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in trace.start.values()], axis=0)
    ends = np.empty((step.graph.num_ops, len(trace.steps)))
    for number, op in enumerate(step.op):
        places = [
            (m // pp, m % pp, call)
            for m, call in zip(step.members[number], step.calls[number], strict=True)
        ]
        if step.kind[number].startswith(LAUNCH):
            ends[number] = trace.start[op][:, *places[0]]
        elif step.graph.phase[number] == SEND_RECV:
            sent = trace.end[f"{op}-send"][:, *places[0]]
            received = trace.end[f"{op}-recv"][:, *places[1]]
            ends[number] = np.maximum(sent, received)
        else:
            ends[number] = np.min([trace.end[op][:, *place] for place in places], axis=0)
    return ends - lowest


def replayed_step_times(
    step: StepGraph, latencies: Float[np.ndarray, "ops steps"]
) -> Float[np.ndarray, " steps"]:
    """Step times with given latencies: each op starts when all ops that it waits for have ended."""
    _, ends = replay_graph(step.graph.predecessors, latencies)
    return ends[[n for nodes in step.graph.last for n in nodes]].max(axis=0)
