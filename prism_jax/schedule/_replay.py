"""Runs a graph of ops with given latencies on the host."""

import functools as ft
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from .._ragged import pad, ragged
from ._graph import OpGraph


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


def latest_ends(
    graph: OpGraph, latencies: Float[np.ndarray, " ops"], groups: Sequence[Sequence[int]]
) -> Float[np.ndarray, " groups"]:
    """When each of some groups of ops has ended, if every op starts as soon as it can, from zero.

    As `replay`, bit by bit, and four times as fast where each send_recv waits for one op only.
    """
    small = _contracted(graph)
    if small is None:
        number, ends = np.arange(graph.num_ops), replay(graph.predecessors, latencies)[1]
    else:
        number, computes, first, second, delay = small
        delays = np.append(latencies, 0.0)[delay].tolist()
        found = [0.0]
        # Numbers of Python are faster one by one than arrays of a few.
        for one, other, sent, latency in zip(
            first, second, delays, latencies[computes].tolist(), strict=True
        ):
            start, arrival = found[one], found[other] + sent
            found.append((start if start > arrival else arrival) + latency)
        ends = np.array(found)
    return np.array([ends[number[list(ops)]].max(initial=0.0) for ops in groups])


_Contracted = tuple[
    Int[np.ndarray, " all"], Int[np.ndarray, " ops"], list[int], list[int], Int[np.ndarray, " ops"]
]


# As many as the graphs that `op_graph` keeps and returns again.
@ft.lru_cache(maxsize=4)
def _contracted(graph: OpGraph) -> _Contracted | None:
    """The ops that compute, numbered from one, with send_recvs as delays; zero stands for none.

    **Returns:**

    The number of each op of the graph; for each op that computes, its place in the graph, the two
    that it waits for, and the send_recv that brings the tensor of the second, or -1. `None` where a
    send_recv waits for several ops, or an op for more than two or two of them.
    """
    sends = np.append(graph.is_send_recv, False)  # The last stands for none.
    rows = ragged(graph.predecessors)
    counts = np.diff(rows.starts)
    if counts.max(initial=0) > 2 or (counts[sends[:-1]] != 1).any():
        return None
    one, other = np.pad(pad(rows, -1), ((0, 0), (0, 1)), constant_values=-1)[:, :2].T
    one, other = np.where(sends[one], other, one), np.where(sends[one], one, other)
    ops = np.flatnonzero(~sends[:-1])
    if sends[one[ops]].any():
        return None
    number = np.append(np.cumsum(~sends[:-1]), 0)
    delay = np.where(sends[other], other, -1)[ops]
    # Of the ops that a send_recv waits for, the one that computes.
    source = np.append(one, -1)
    second = np.where(delay >= 0, source[delay], other[ops])
    return number[:-1], ops, number[one[ops]].tolist(), number[second].tolist(), delay
