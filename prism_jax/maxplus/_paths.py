"""What all ops of a graph look like in a few samples: latencies, critical paths and slack, where
`propagate` keeps only the ends of the sinks.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._levels import Levels
from ._propagate import Latencies


def op_latencies(
    levels: Levels, latencies: Latencies, num_samples: int
) -> Float[Array, "ops samples"]:
    """The latency of every op, in seconds, as `propagate` draws it."""
    lanes = levels.ops.value
    number = jnp.arange(len(lanes), dtype=jnp.uint32)
    column = jnp.arange(lanes.shape[1], dtype=jnp.uint32)[:, None]

    def step(_, level):
        number, ops, rows = level
        mine = {name: latencies.tables[name][row] for name, row in rows.items()}
        z = latencies.noise(latencies.noise_arguments, number, column)
        drawn = latencies.latency(ops[:, None], mine, latencies.shared, z)
        return None, jnp.broadcast_to(drawn, (lanes.shape[1], num_samples))

    _, drawn = lax.scan(step, None, (number, jnp.asarray(lanes), latencies.rows))
    places = jnp.argsort(jnp.asarray(lanes.reshape(-1)))[-levels.num_ops :]  # Padding is -1.
    return drawn.reshape(-1, num_samples)[places]


def critical_ops(
    levels: Levels, ends: Float[Array, "ops samples"], sink: Int[Array, " samples"]
) -> Bool[Array, "ops samples"]:
    """The ops on the critical path to a sink: back from its latest op to the latest that each op
    waits for; among equals the first, as for the derivative of `propagate`.

    **Arguments:**

    - `ends`: from `op_ends`.
    - `sink`: the number of the sink in each sample.
    """
    columns = jnp.arange(ends.shape[1])
    # The row behind the last op stands for "waits for nothing".
    ends = jnp.concatenate([ends, jnp.full_like(ends[:1], -1.0)])
    last = jnp.asarray(levels.sink_ops.value)[sink].T
    latest = jnp.argmax(ends[last, columns[None, :]], axis=0)
    critical = jnp.zeros(ends.shape, bool).at[last[latest, columns], columns].set(True)

    def step(critical, level):
        ops, before = level
        which = jnp.argmax(ends[before], axis=1)  # Of the ops that a lane waits for.
        chosen = jnp.take_along_axis(before, which, axis=1)
        mine = critical[ops] & (ops >= 0)[:, None]
        return critical.at[chosen, columns[None, :]].max(mine), None

    levels_of = (jnp.asarray(levels.ops.value), jnp.asarray(levels.predecessors.value))
    critical, _ = lax.scan(step, critical, levels_of, reverse=True)
    return critical[:-1]


def latest_ends(
    levels: Levels,
    latencies: Float[Array, "ops samples"],
    at_sinks: Float[Array, "sinks samples"],
) -> Float[Array, "ops samples"]:
    """How late each op may end, in seconds, if no sink is to end later than given."""
    late = jnp.full((levels.num_ops + 1, latencies.shape[1]), jnp.inf, latencies.dtype)
    for ops, most in zip(levels.sink_ops.value, at_sinks, strict=True):
        late = late.at[ops].min(most[None, :])

    def step(late, level):
        ops, before = level
        most = jnp.where((ops >= 0)[:, None], late[ops] - latencies[ops], jnp.inf)
        most = jnp.broadcast_to(most[:, None, :], (*before.shape, most.shape[1]))
        return late.at[before].min(most), None

    levels_of = (jnp.asarray(levels.ops.value), jnp.asarray(levels.predecessors.value))
    late, _ = lax.scan(step, late, levels_of, reverse=True)
    return late[:-1]
