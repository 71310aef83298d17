"""What all ops of a graph look like in a few samples: latencies, critical paths and slack, where
`propagate` keeps only the ends of the sinks. Ops are found by their cell: see [`Lanes`][].
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._lanes import Lanes
from ._propagate import Latencies, level_latencies


def cell_latencies(
    lanes: Lanes, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "cells samples"]:
    """The latency of the op of every cell, in seconds, as `propagate` draws it."""

    def step(level, drawn):
        mine = level_latencies(latencies, latencies.tables, latencies.common, lanes, level)
        mine = jnp.broadcast_to(mine, (lanes.width, num_samples))
        first = level * np.int32(lanes.width)
        return lax.dynamic_update_slice_in_dim(drawn, mine, first, 0)

    drawn = jnp.zeros((lanes.num_cells, num_samples), dtype)
    return lax.fori_loop(0, lanes.num_levels, step, drawn)


def cell_ends(
    lanes: Lanes, latencies: Float[Array, "cells samples"]
) -> Float[Array, "cells samples"]:
    """The end of the op of every cell, in seconds, from latencies that already exist.

    For graphs and sample counts small enough to hold.
    """
    # The row behind the last cell stands for "waits for nothing".
    ends = jnp.zeros((len(latencies) + 1, latencies.shape[1]), latencies.dtype)

    def step(level, ends):
        first = level * np.int32(lanes.width)
        mine = lax.dynamic_slice_in_dim(latencies, first, lanes.width)
        mine = jnp.where((lanes.ops[level] >= 0)[:, None], mine, 0)
        new = jnp.max(ends[lanes.before[level]], axis=1) + mine
        return lax.dynamic_update_slice_in_dim(ends, new, first, 0)

    return lax.fori_loop(0, lanes.num_levels, step, ends)[:-1]


def critical_cells(
    lanes: Lanes, ends: Float[Array, "cells samples"], sink: Int[Array, " samples"]
) -> Bool[Array, "cells samples"]:
    """The cells on the critical path to a sink: back from its latest op to the latest that each op
    waits for; among equals the first, as for the derivative of `propagate`.

    **Arguments:**

    - `ends`: from `cell_ends`.
    - `sink`: the number of the sink in each sample.
    """
    columns = jnp.arange(ends.shape[1])
    # The row behind the last cell stands for "waits for nothing".
    ends = jnp.concatenate([ends, jnp.full_like(ends[:1], -1.0)])
    last = lanes.sink_cells[sink].T
    latest = jnp.argmax(ends[last, columns[None, :]], axis=0)
    critical = jnp.zeros(ends.shape, bool).at[last[latest, columns], columns].set(True)

    def step(i, critical):
        level = lanes.num_levels - 1 - i
        before = lanes.before[level]
        which = jnp.argmax(ends[before], axis=1)  # Of the ops that a lane waits for.
        chosen = jnp.take_along_axis(before, which, axis=1)
        first = level * np.int32(lanes.width)
        mine = lax.dynamic_slice_in_dim(critical, first, lanes.width)
        mine &= (lanes.ops[level] >= 0)[:, None]
        return critical.at[chosen, columns[None, :]].max(mine)

    return lax.fori_loop(0, lanes.num_levels, step, critical)[:-1]


def latest_ends(
    lanes: Lanes,
    latencies: Float[Array, "cells samples"],
    at_sinks: Float[Array, "sinks samples"],
) -> Float[Array, "cells samples"]:
    """How late the op of each cell may end, in seconds, if no sink is to end later than given."""
    late = jnp.full((len(latencies) + 1, latencies.shape[1]), jnp.inf, latencies.dtype)
    most = jnp.repeat(at_sinks, lanes.sink_cells.shape[1], axis=0)
    late = late.at[lanes.sink_cells.reshape(-1)].min(most)

    def step(i, late):
        level = lanes.num_levels - 1 - i
        before, first = lanes.before[level], level * np.int32(lanes.width)
        mine = lax.dynamic_slice_in_dim(late, first, lanes.width)
        mine = mine - lax.dynamic_slice_in_dim(latencies, first, lanes.width)
        most = jnp.where((lanes.ops[level] >= 0)[:, None], mine, jnp.inf)
        most = jnp.broadcast_to(most[:, None, :], (*before.shape, most.shape[1]))
        return late.at[before].min(most)

    return lax.fori_loop(0, lanes.num_levels, step, late)[:-1]
