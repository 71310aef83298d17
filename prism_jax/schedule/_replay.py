"""Runs a graph of ops with given latencies on the host."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def replay(
    predecessors: Sequence[Sequence[int]], latencies: Float[np.ndarray, "ops *steps"]
) -> tuple[Float[np.ndarray, "ops *steps"], Float[np.ndarray, "ops *steps"]]:
    """When ops start and end: each starts when all ops that it waits for have ended.

    **Arguments:**

    - `predecessors`: for each op, the ops before it in the list that it waits for.
    - `latencies`: of each op, in one step or in several at once.

    **Returns:**

    The starts and the ends, from zero.
    """
    one = latencies.ndim == 1
    zero = 0.0 if one else np.zeros(latencies.shape[1:])
    latest = max if one else np.maximum.reduce  # One at a time, Python's numbers are faster.
    starts, ends = [], []
    for before, latency in zip(predecessors, latencies.tolist() if one else latencies, strict=True):
        if len(before) == 1:  # A fast path for most ops, which halves the time.
            start = ends[before[0]]
        else:
            start = latest([ends[op] for op in before]) if before else zero
        starts.append(start)
        ends.append(start + latency)
    return np.array(starts), np.array(ends)
