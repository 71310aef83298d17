"""All ops of a graph in a few samples: latencies, ends, critical paths and slack, where `propagate`
keeps only the ends of the sinks. All but latencies is by NumPy, so that nothing is compiled.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._ragged import as_matrix, group, take
from ._levels import Levels
from ._propagate import Latencies, level_latencies


# What more ops than this wait for is looked at by itself.
_MOST_AFTER = 8


def cell_latencies(
    levels: Levels, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "cells samples"]:
    """The latency of the op of every cell, in seconds, as `propagate` draws it."""

    def step(level, drawn):
        seconds = level_latencies(latencies, latencies.tables, latencies.common, levels, level)
        seconds = jnp.broadcast_to(seconds, (levels.width, num_samples))
        first = level * np.int32(levels.width)
        return lax.dynamic_update_slice_in_dim(drawn, seconds, first, 0)

    drawn = jnp.zeros((levels.ops.size, num_samples), dtype)
    return lax.fori_loop(0, levels.num_levels, step, drawn)


def predecessors_of(levels: Levels) -> Int[np.ndarray, "ops_joins_and_none fan_in"]:
    """The ops and joins that each op and each join waits for, or -1; at last those of "no op"."""
    number = levels.num_ops + levels.num_joins + 1
    predecessors = np.full((number, levels.before.shape[2]), -1)
    predecessors[levels.nodes] = levels.predecessors
    return predecessors


def edges_of(levels: Levels) -> tuple[Int[np.ndarray, " edges"], Int[np.ndarray, " edges"]]:
    """Pairs of ops of which the first waits for the second, sorted by the first: without joins."""
    before = predecessors_of(levels)
    op, column = np.nonzero(before[: levels.num_ops] >= 0)
    waits_for = before[op, column]
    # In place of a join, what it joins.
    before[: levels.num_ops] = -1
    before[: levels.num_ops, 0] = range(levels.num_ops)
    node, column = np.nonzero(before >= 0)
    parts = group(node, before[node, column], len(before))
    while (waits_for >= levels.num_ops).any():
        op = np.repeat(op, np.diff(parts.starts)[waits_for])
        waits_for = take(parts, waits_for).values
    return op, waits_for


def op_ends(
    levels: Levels, latencies: Float[np.ndarray, "ops samples"]
) -> Float[np.ndarray, "ops_joins_and_none samples"]:
    """When each op ends, in seconds, then each join. The last row stands for "no op", which ends at
    zero.
    """
    more = np.zeros((levels.num_joins + 1, latencies.shape[1]), latencies.dtype)
    latencies = np.concatenate([latencies, more])
    ends = np.zeros_like(latencies)
    for ops, before in zip(levels.nodes, levels.predecessors, strict=True):
        latest = np.maximum.reduce(ends.take(before, axis=0), axis=1)
        ends[ops] = latest + latencies.take(ops, axis=0)
    return ends


def critical_ops(
    levels: Levels,
    ends: Float[np.ndarray, "ops_joins_and_none samples"],
    sink: Int[np.ndarray, " samples"],
) -> Bool[np.ndarray, "ops samples"]:
    """Whether each op is on the critical path to a sink: the latest op of the sink, and the latest
    that each waits for, back to the start; among equals the first, as for the derivative of
    `propagate`.

    **Arguments:**

    - `ends`: from `op_ends`.
    - `sink`: the number of the sink in each sample.
    """
    columns, before = np.arange(len(sink)), predecessors_of(levels)
    critical, candidates = np.zeros(ends.shape, bool), levels.sink_ops[sink]
    while (candidates >= 0).any():
        op = candidates[columns, ends[candidates, columns[:, None]].argmax(axis=1)]
        critical[op, columns] = True
        candidates = before[op]
    return critical[: levels.num_ops]


def latest_ends(
    levels: Levels,
    latencies: Float[np.ndarray, "ops samples"],
    at_sinks: Float[np.ndarray, "sinks samples"],
) -> Float[np.ndarray, "ops samples"]:
    """How late each op may end, in seconds, if no sink is to end later than given."""
    before = predecessors_of(levels)
    op, which = np.nonzero(before >= 0)
    after = group(before[op, which], op, len(before))
    # Rows as long as those of the op that most wait for would take its number times all ops.
    wide = np.diff(after.starts) > _MOST_AFTER
    few = as_matrix(take(after, np.where(wide, len(before) - 1, np.arange(len(before)))), -1)
    more = np.zeros((levels.num_joins + 1, latencies.shape[1]), latencies.dtype)
    latencies = np.concatenate([latencies, more])
    late = np.full_like(latencies, np.inf)
    for ops, most in zip(levels.sink_ops, at_sinks, strict=True):
        late[ops[ops >= 0]] = np.minimum(late[ops[ops >= 0]], most)
    starts = late.copy()
    for lanes in levels.nodes[::-1]:
        ops = lanes[lanes >= 0]
        late[ops] = np.minimum(late[ops], starts[few[ops]].min(axis=1))
        for op in ops[wide[ops]]:
            waiting = after.values[after.starts[op] : after.starts[op + 1]]
            late[op] = np.minimum(late[op], starts[waiting].min(axis=0))
        starts[ops] = late[ops] - latencies[ops]
    return late[: levels.num_ops]
