"""The steps of a pool: their times, and those that they would have without the sample that decides.

The error of a figure is how it moves with the weights of samples. If a sample weighs a little more
than by its law, the mean of any function of the slowest of R replicas moves by the mean, over steps
that this sample decides, of the function at the slowest minus that at the slowest of the others.
"""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..random import KeyData, Stream, fold
from ..replica import Plan
from ._pool import Pool, picked
from ._step import StepParts, step_parts


class Decided(eqx.Module):
    """Steps of a pool.

    **Attributes:**

    - `times`: in seconds.
    - `without`: the same without the replica that decided a step; `nan` if it looked at no other.
    - `decider`: the position in the pool of the sample that decided it; of several pools, as if
        they stood one after the other.
    - `sink`: the sink that decided it; of equals the first.
    - `last`: whether the last of the replicas that it looked at in a pool decided it, though it has
        more of this pool: then more should be.
    """

    times: Float[Array, " steps"]
    without: Float[Array, " steps"]
    decider: Int[Array, " steps"]
    sink: Int[Array, " steps"]
    last: Bool[Array, " steps"]


class Composed(eqx.Module):
    """What decided steps consist of.

    **Attributes:**

    - `parts`: of each.
    - `without`: its barrier without the replica that decided it; `nan` if it looked at no other.
    - `regime`: of the network.
    """

    parts: StepParts
    without: Float[Array, " steps"]
    regime: Int[Array, " steps"]


def decided_steps(
    plan: Plan,
    pools: Sequence[Pool],
    step_ids: UInt32[Array, " steps"],
    key: KeyData,
    *ranks: Int[Array, " steps"],
) -> tuple[Decided, Composed]:
    """The steps of a pool, by the ids of their own draws; or of several, whose replicas differ.

    **Arguments:**

    - `ranks`: for each pool but the first, the rank of each step among those of the pool. In the
        first they are in order.
    """
    places = (step_ids - pools[0].first_step).astype(jnp.int32), *ranks
    samples, regimes = picked(pools[0], places[0], step_ids, key, plan.dtype)
    ends, before = pools[0].ends[samples], 0
    for number in range(1, len(pools)):
        before += len(pools[number - 1].ends)
        pool_key = fold(key, Stream.UNLIKE, number)
        unlike, _ = picked(pools[number], places[number], step_ids, pool_key, plan.dtype)
        ends = jnp.concatenate([ends, pools[number].ends[unlike]])
        samples = jnp.concatenate([samples, before + unlike])
    by_step, ends = ends, jnp.moveaxis(ends, 2, 1)
    latest = jnp.max(ends, axis=0)  # Of `(looks, sinks, steps)`.
    room, sinks = len(plan.structure.sinks.first), len(latest)
    padded = jnp.pad(latest, ((0, room - sinks), (0, 0)))
    ready, parts = step_parts(plan, padded, step_ids, key, regimes)
    ready = ready[:sinks]
    # The first of equals, by a plain reduction: XLA's `argmax` over many is slower on a CPU.
    number = jnp.arange(sinks, dtype=jnp.int32)[:, None]
    sink = jnp.min(jnp.where(ready == parts.barrier[None], number, sinks - 1), axis=0)
    look = jnp.argmax(jnp.take_along_axis(by_step, sink[None, :, None], axis=2)[..., 0], axis=0)
    decides = look[None] == jnp.arange(len(samples), dtype=look.dtype)[:, None]
    decider = jnp.sum(jnp.where(decides, samples, 0), axis=0, dtype=samples.dtype)
    barrier = jnp.full_like(parts.barrier, jnp.nan)
    if len(samples) > 1:
        of_looks = jnp.max(ends + (ready - latest)[None], axis=1)
        barrier = jnp.max(jnp.where(decides, -jnp.inf, of_looks), axis=0)
    without = parts.factor * (barrier + parts.tail)
    is_last = [jnp.append(jnp.zeros(len(pool.later), bool), ~pool.all_looked_at) for pool in pools]
    last = jnp.concatenate(is_last)[look]
    steps = Decided(parts.times(), without, decider, sink, last)
    return steps, Composed(parts, barrier, regimes)
