"""The stalls of replica samples: how many, where they are, and how long they last."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

from ..op_law import Pause, look_up
from ..random import KeyData, Stream, counters, fold, normals, uniforms
from ._plan import Plan


def pauses_of(
    plan: Plan,
    sample_ids: UInt32[Array, " samples"],
    regimes: Int[Array, " samples"],
    number: Int[Array, " samples"],
    key: KeyData,
) -> tuple[Pause, ...]:
    """The stalls of samples with given regimes of the network and numbers of stalls."""
    ops, kinds = plan.structure.replica.stall_op, plan.structure.classes.stall_kind
    if ops is None or kinds is None:
        return ()
    entries = stall_entries(plan, sample_ids, number, key)
    counter = np.uint32(2) * counters(len(entries)) + np.uint32(1)
    z = normals(fold(key, Stream.STALLS), sample_ids, counter, plan.dtype)
    op = jnp.where(entries >= 0, ops[entries], -2)
    seconds = look_up(plan.tables.stall_sizes, kinds[entries], z)
    if (slack := plan.tables.stall_slack) is not None:
        meeting, class_ = plan.tables.stall_meeting, plan.structure.classes.stall_class
        assert meeting is not None
        assert class_ is not None
        hidden = slack[kinds[entries], class_[entries], regimes[None, :]]
        seconds = jnp.maximum(seconds - hidden, 0)
        # Of those before the same wait, the longest counts.
        earlier = np.tri(len(op), k=-1, dtype=bool)[:, :, None] & (op[:, None] == op[None])
        longest = jnp.max(jnp.where(earlier, seconds[None], 0), axis=1)
        seconds -= meeting[class_[entries]] * jnp.minimum(seconds, longest)
    return tuple(Pause(op[j : j + 1], seconds[j : j + 1]) for j in range(len(op)))


def stall_entries(
    plan: Plan,
    sample_ids: UInt32[Array, " samples"],
    number: Int[Array, " samples"],
    key: KeyData,
) -> Int[Array, "stalls samples"]:
    """The entry of `stall_op` that each of so many stalls of a sample is, or -1 for none."""
    assert plan.tables.stall_shares is not None
    # An entry that cannot stall has no share, and is never drawn.
    shares = lax.stop_gradient(jnp.cumsum(plan.tables.stall_shares))
    stall = counters(plan.structure.classes.stall_counts)
    u = uniforms(fold(key, Stream.STALLS), sample_ids, np.uint32(2) * stall, plan.dtype)
    entry = jnp.clip(jnp.searchsorted(shares, u * shares[-1]), 0, len(shares) - 1)
    return jnp.where(number[None, :] > stall.astype(jnp.int32), entry, -1)


def poisson_stalls(
    plan: Plan, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> Int[Array, " samples"]:
    """The number of stalls of each sample by its law, for replicas that are all simulated."""
    most: Any = plan.structure.classes.most_stalls
    words, counter = fold(key, Stream.STALLS), 2 * most.astype(jnp.uint32)
    u = uniforms(words, sample_ids, counter, plan.dtype)
    bounds = jnp.cumsum(plan.tables.stall_counts)
    # The most that there is stands for more, and what follows is padding.
    number = jnp.arange(len(bounds), dtype=jnp.int32)
    bounds = jnp.where(number < most, bounds, 2)
    return jnp.searchsorted(bounds, u, side="right").astype(jnp.int32)
