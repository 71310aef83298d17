"""All ops of a graph in a few samples: latencies, ends, critical paths and slack, where `propagate`
keeps only the ends of the sinks. All but latencies is by NumPy, so that nothing is compiled.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._ragged import group, pad
from ._lanes import Lanes
from ._levels import Levels
from ._propagate import Latencies, level_latencies


def cell_latencies(
    lanes: Lanes, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "cells samples"]:
    """The latency of the op of every cell, in seconds, as `propagate` draws it: see [`Lanes`][]."""

    def step(level, drawn):
        mine = level_latencies(latencies, latencies.tables, latencies.common, lanes, level)
        mine = jnp.broadcast_to(mine, (lanes.width, num_samples))
        first = level * np.int32(lanes.width)
        return lax.dynamic_update_slice_in_dim(drawn, mine, first, 0)

    drawn = jnp.zeros((lanes.ops.size, num_samples), dtype)
    return lax.fori_loop(0, lanes.num_levels, step, drawn)


def predecessors_of(levels: Levels) -> Int[np.ndarray, "ops_and_none fan_in"]:
    """The ops that each op waits for, or -1; at last those of "no op"."""
    found = np.full((levels.num_ops + 1, levels.predecessors.value.shape[2]), -1)
    found[levels.ops.value] = levels.predecessors.value
    return found


def op_ends(
    levels: Levels, latencies: Float[np.ndarray, "ops samples"]
) -> Float[np.ndarray, "ops_and_none samples"]:
    """When each op ends, in seconds. The last row stands for "no op", which ends at zero."""
    ends = np.zeros((len(latencies) + 1, latencies.shape[1]), latencies.dtype)
    latencies = np.concatenate([latencies, ends[-1:]])
    lanes, waits_for = (x.value.astype(np.intp) for x in (levels.ops, levels.predecessors))
    for ops, before in zip(lanes, waits_for, strict=True):
        latest = np.maximum.reduce(ends.take(before, axis=0), axis=1)
        ends[ops] = latest + latencies.take(ops, axis=0)
    return ends


def critical_ops(
    levels: Levels,
    ends: Float[np.ndarray, "ops_and_none samples"],
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
    critical, some = np.zeros(ends.shape, bool), levels.sink_ops.value[sink]
    while (some >= 0).any():
        op = some[columns, ends[some, columns[:, None]].argmax(axis=1)]
        critical[op, columns] = True
        some = before[op]
    return critical[:-1]


def latest_ends(
    levels: Levels,
    latencies: Float[np.ndarray, "ops samples"],
    at_sinks: Float[np.ndarray, "sinks samples"],
) -> Float[np.ndarray, "ops samples"]:
    """How late each op may end, in seconds, if no sink is to end later than given."""
    before = predecessors_of(levels)
    op, which = np.nonzero(before >= 0)
    after = pad(group(before[op, which], op, levels.num_ops), -1)
    late = np.full((len(latencies) + 1, latencies.shape[1]), np.inf, latencies.dtype)
    for ops, most in zip(levels.sink_ops.value, at_sinks, strict=True):
        late[ops[ops >= 0]] = np.minimum(late[ops[ops >= 0]], most)
    starts = late.copy()
    for lanes in levels.ops.value[::-1]:
        ops = lanes[lanes >= 0]
        late[ops] = np.minimum(late[ops], starts[after[ops]].min(axis=1))
        starts[ops] = late[ops] - latencies[ops]
    return late[:-1]
