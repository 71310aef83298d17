"""The steps of a pool: their times, and those that they would have without the sample that decides.

The error of a figure is how it moves with the weights of samples. If a sample weighs a little more
than by its law, the mean of any function of the slowest of R replicas moves by the mean, over steps
that this sample decides, of the function at the slowest minus that at the slowest of the others.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..random import KeyData
from ..replica import Plan
from ._pool import Pool, picked
from ._step import step_parts


class Decided(eqx.Module):
    """Steps of a pool.

    **Attributes:**

    - `times`: in seconds.
    - `without`: the same without the replica that decided a step; `nan` if it looked at no other.
    - `decider`: the position in the pool of the sample that decided it.
    - `sink`: the sink that decided it; of equals the first.
    - `slowest`: the position in the pool of its slowest replica.
    - `last`: whether the last of the replicas that it looked at decided it: then more should be.
    """

    times: Float[Array, " steps"]
    without: Float[Array, " steps"]
    decider: Int[Array, " steps"]
    sink: Int[Array, " steps"]
    slowest: Int[Array, " steps"]
    last: Bool[Array, " steps"]


def decided_steps(
    plan: Plan, pool: Pool, step_ids: UInt32[Array, " steps"], key: KeyData
) -> Decided:
    """The steps of a pool, by the ids of their own draws."""
    samples, regimes = picked(pool, step_ids, key, plan.dtype)
    ends = jnp.moveaxis(pool.ends[samples], 2, 1)
    latest = jnp.max(ends, axis=0)  # Of `(looks, sinks, steps)`.
    room, number = len(plan.structure.sinks.first), len(latest)
    padded = jnp.pad(latest, ((0, room - number), (0, 0)))
    ready, parts = step_parts(plan, padded, step_ids, key, regimes)
    ready = ready[:number]
    sink = jnp.argmax(ready, axis=0).astype(jnp.int32)
    at_sink = sink[None] == jnp.arange(number, dtype=sink.dtype)[:, None]
    look = jnp.argmax(jnp.any((ends == latest[None]) & at_sink[None], axis=1), axis=0)
    decides = look[None] == jnp.arange(len(samples), dtype=look.dtype)[:, None]
    decider = jnp.sum(jnp.where(decides, samples, 0), axis=0, dtype=samples.dtype)
    without = jnp.full_like(parts.barrier, jnp.nan)
    if len(samples) > 1:
        left = jnp.max(jnp.where(decides[:, None], -jnp.inf, ends), axis=0)
        barrier = jnp.max(left + (ready - latest), axis=0)
        without = parts.factor * (barrier + parts.tail)
    return Decided(parts.times(), without, decider, sink, samples[0], look == len(samples) - 1)
