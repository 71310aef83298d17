"""Max-plus propagation: an op starts when all it waits for has ended, and ends a latency later."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ._levels import Levels


def propagate(
    levels: Levels,
    latency: Callable[[Int[Array, " width"], Any], Float[Array, "width samples"]],
    per_level: Any,
    start: Float[Array, " samples"],
) -> Float[Array, "sinks samples"]:
    """The ends of a graph's sinks, one level after the other.

    Latencies are asked for where they are used, so that no array over all ops need exist.

    **Arguments:**

    - `levels`: the graph.
    - `latency`: gives the latencies of one level's lanes (in seconds, not negative) from their op
        numbers (-1 for padding, where any finite value will do) and the slice of `per_level`.
    - `per_level`: a PyTree of arrays whose leading axis runs over the levels.
    - `start`: when the ops that wait for nothing start, in seconds, for each sample.

    **Returns:**

    The latest end of the ops of each sink. Differentiable with respect to the latencies and
    `start`; at ties the derivative is shared equally.
    """
    state = jnp.broadcast_to(start, (levels.num_slots, *start.shape))

    def step(state, level):
        ops, reads, writes, rest = level
        ends = jnp.max(state[reads], axis=1) + latency(ops, rest)
        return state.at[writes].set(ends), None

    rows = (
        jnp.asarray(levels.ops.value),
        jnp.asarray(levels.reads.value),
        jnp.asarray(levels.writes.value),
        per_level,
    )
    state, _ = lax.scan(step, state, rows)
    return jnp.max(state[levels.sinks.value], axis=1)


def op_ends(levels: Levels, latencies: Float[Array, "ops samples"]) -> Float[Array, "ops samples"]:
    """The end of every op, in seconds, from latencies that already exist.

    For graphs and sample counts small enough to hold. Differentiable; ties share equally.
    """
    lanes = levels.ops.value
    ends = jnp.zeros((levels.num_ops + 1, latencies.shape[1]), latencies.dtype)
    # The row behind the last op stands for "waits for nothing".
    before = jnp.asarray(levels.predecessors.value)

    def step(ends, level):
        ops, before = level
        new = jnp.max(ends[before], axis=1) + latencies[ops]
        return ends.at[jnp.where(ops < 0, levels.num_ops + 1, ops)].set(new, mode="drop"), None

    ends, _ = lax.scan(step, ends, (jnp.asarray(lanes), before))
    return ends[:-1]
