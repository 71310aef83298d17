"""The steps of a pool: their times, and those that they would have without the sample that decides.

The error of a figure is how it moves if a group of samples is left out. A step that was decided by
a sample of this group then ends when the next slowest of its replicas of another group lets it.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..random import KeyData
from ..replica import Plan
from ._pool import GROUPS, Pool, picked
from ._step import step_parts


class Decided(eqx.Module):
    """Steps of a pool.

    **Attributes:**

    - `times`: in seconds.
    - `without`: the same without the replicas of the group that decided a step; `nan` if it looked
        at no other.
    - `group`: the group of the sample that decided it, counted through the regimes of the network.
    - `slowest`: the position in the pool of its slowest replica.
    - `last`: whether the last of the replicas that it looked at decided it: then more should be.
    """

    times: Float[Array, " steps"]
    without: Float[Array, " steps"]
    group: Int[Array, " steps"]
    slowest: Int[Array, " steps"]
    last: Bool[Array, " steps"]


def decided_steps(
    plan: Plan, pool: Pool, step_ids: UInt32[Array, " steps"], key: KeyData
) -> Decided:
    """The steps of a pool, by the ids of their own draws."""
    samples, regimes = picked(pool, step_ids, key, plan.dtype)
    ends, group = jnp.moveaxis(pool.ends[samples], 2, 1), pool.group[samples]
    latest = jnp.max(ends, axis=0)  # Of `(looks, sinks, steps)`.
    room, number = len(plan.structure.sinks.first), len(latest)
    padded = jnp.pad(latest, ((0, room - number), (0, 0)))
    ready, parts = step_parts(plan, padded, step_ids, key, regimes)
    ready = ready[:number]
    decides = (ends == latest[None]) & (ready == jnp.max(ready, axis=0, keepdims=True))[None]
    which = jnp.argmax(jnp.any(decides, axis=1), axis=0)
    decided = which[None] == jnp.arange(len(group))[:, None]
    decider = jnp.sum(jnp.where(decided, group, 0), axis=0, dtype=group.dtype)
    without = jnp.full_like(parts.barrier, jnp.nan)
    if len(samples) > 1:
        gone = group == decider[None]
        left = jnp.max(jnp.where(gone[:, None], -jnp.inf, ends), axis=0)
        barrier = jnp.max(left + (ready - latest), axis=0)
        barrier = jnp.where(jnp.all(gone, axis=0), jnp.nan, barrier)
        without = parts.factor * (barrier + parts.tail)
    of_regime = decider + GROUPS * regimes
    return Decided(parts.times(), without, of_regime, samples[0], which == len(samples) - 1)
