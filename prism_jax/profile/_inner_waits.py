"""Compute that waits for other replicas before it starts: in fully sharded training (FSDP), it
first gathers its parameters, so all replicas wait for the last.
"""

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Outline
from ..program import StepGraph, op_latencies, step_graph
from ..trace import Trace


# A kind of op has such a wait if its latencies vary less without it, by this share and by this many
# standard errors, and if at most this share of its ops end before the last op that they would wait
# for. If there is no such wait, subtracting one makes the variance larger.
_EXPLAINED, _SEEN, _EARLY = 0.05, 2.0, 0.05


def with_inner_waits(outline: Outline, trace: Trace) -> Outline:
    """The outline with the kinds of compute that start with a wait for all replicas.

    A slow forward of one replica is a long wait in the backwards of the others. If both were drawn
    independently, steps would contain the delay twice.
    """
    if trace.job.layout.dp < 2 or len(trace.steps) < 2:
        return outline
    plain, found = step_graph(trace.job, outline), []
    for kind in plain.phases:
        gathered = step_graph(trace.job, msgspec.structs.replace(outline, gathered=(kind,)))
        without, _ = _squares(trace, plain, kind)
        squares, early = _squares(trace, gathered, kind)
        less = without - squares
        error = float(np.std(less, ddof=1)) / np.sqrt(len(less))
        if early <= _EARLY and less.mean() > max(_EXPLAINED * without.mean(), _SEEN * error):
            found.append(kind)
    return msgspec.structs.replace(outline, gathered=tuple(found))


def _squares(trace: Trace, step: StepGraph, kind: str) -> tuple[Float[np.ndarray, " steps"], float]:
    """For each step, the mean square of the deviations of a kind of op from its means, and the
    share of these ops that end before they could start.
    """
    latencies = op_latencies(trace, step)[np.array(step.kind) == kind]
    off = latencies - latencies.mean(axis=1, keepdims=True)
    return np.mean(off**2, axis=0), float(np.mean(latencies <= 0))
