"""Propagation by NumPy, for a few samples: nothing is compiled."""

import numpy as np
from jaxtyping import Bool, Float, Int

from ._levels import Levels


def op_ends(
    levels: Levels, latencies: Float[np.ndarray, "ops samples"]
) -> tuple[Float[np.ndarray, "ops_and_none samples"], Int[np.ndarray, "ops_and_none samples"]]:
    """When each op ends, in seconds, and the op that it waited for last, or -1. The last row stands
    for "no op", which ends at zero. Where ends are equal, the first is the latest.
    """
    shape, columns = (len(latencies) + 1, latencies.shape[1]), np.arange(latencies.shape[1])
    ends, before = np.zeros(shape), np.full(shape, -1)
    for lanes, waits_for in zip(levels.ops.value, levels.predecessors.value, strict=True):
        ops, waits_for = lanes[lanes >= 0], waits_for[lanes >= 0]
        latest = ends[waits_for].argmax(axis=1)
        before[ops] = np.take_along_axis(waits_for, latest, axis=1)
        ends[ops] = ends[before[ops], columns] + latencies[ops]
    return ends, before


def critical_ops(
    levels: Levels,
    latencies: Float[np.ndarray, "ops samples"],
    after: Float[np.ndarray, "sinks samples"],
) -> Bool[np.ndarray, "ops samples"]:
    """Whether each op is on the critical path of each sample: the ops that the latest sink waits
    for, back to the start.

    **Arguments:**

    - `latencies`: of each op, in seconds.
    - `after`: what follows each sink, in seconds.
    """
    ends, before = op_ends(levels, latencies)
    columns, of_sinks = np.arange(latencies.shape[1]), ends[levels.sink_ops.value]
    sink = (of_sinks.max(axis=1) + after).argmax(axis=0)
    op = levels.sink_ops.value[sink, of_sinks.argmax(axis=1)[sink, columns]]
    critical = np.zeros(ends.shape, bool)
    while (op >= 0).any():
        critical[op, columns] = True
        op = before[op, columns]
    return critical[:-1]
