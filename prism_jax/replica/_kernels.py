"""`resolution="kernel"`: draws every kernel of every member, to check the collapse."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from ..maxplus import AbstractOpLaw
from ..program import ALONE, BESIDE, CLOSES, JOINS, MEETS, OPENS, ROW_ENDS, STARTS
from ..random import KeyData, normals
from ._op_law import Common, OpLaw, look_up, look_up_one
from ._plan import Plan
from ._sequences import Sequences


def member_factors(
    plan: Plan, sequences: Sequences, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> Float[Array, "members ranks samples"]:
    """The factor of every GPU of every pipeline rank."""
    ranks = plan.structure.ranks
    shape = (sequences.members, ranks, sample_ids.shape[0])
    if plan.tables.gpu is None:
        return jnp.ones(shape, plan.dtype)
    # Counted by the ranks that there are, so that numbers do not depend on padding.
    rank = jnp.arange(ranks, dtype=jnp.uint32)
    member = jnp.arange(sequences.members, dtype=jnp.uint32)[:, None]
    count = (member * plan.structure.num_ranks + rank[None, :]).reshape(-1, 1)
    return look_up_one(plan.tables.gpu, normals(key, sample_ids, count, plan.dtype)).reshape(shape)


class MemberCommon(eqx.Module):
    """Data that the laws of all ops share.

    **Attributes:**

    - `common`: as for a block.
    - `sequences`: the kernels of the members.
    - `mean`, `kind`, `on_network`: of each kernel, its mean, its kind, and whether the network's
        regime acts on it.
    - `regimes`: the factor on kernels on the network, in the regime of each sample.
    - `ids`, `key`: the ids of the samples and the key, by which their kernels are drawn.
    """

    common: Common
    sequences: Sequences
    mean: Float[Array, " kernels"]
    kind: Int[Array, " kernels"]
    on_network: Bool[Array, " kernels"]
    regimes: Float[Array, "1 samples"]
    ids: UInt32[Array, "1 samples"]
    key: KeyData


class MemberLaw(AbstractOpLaw):
    """The law of an op whose kernels are drawn one by one.

    **Attributes:**

    - `op_law`: the law of the op if it is a single kernel, and the factors on the whole op.
    - `members`: the factor of each member's GPU.
    - `row`: the entry of `Sequences`.
    """

    op_law: OpLaw
    members: tuple[Shaped[Array, "..."], ...]
    row: Shaped[Array, "..."]

    def latency(self, op, z, common: MemberCommon):
        alone = self.op_law.with_data(self.op_law.class_law.latency(z, common.common.residuals))
        together = self._together(op, common)
        seconds = jnp.where(common.sequences.alone[self.row], alone, together)
        return self.op_law.finished(op, seconds, common.common)

    def _together(self, op, common: MemberCommon) -> Any:
        """The latency of the row of kernels: members run independently until they wait."""
        steps, count = common.sequences.steps, len(self.members)
        slowdowns = common.sequences.slowdowns
        longest, dtype = steps.shape[1], common.mean.dtype
        factor = jnp.stack(self.members)
        if self.op_law.microbatch is not None:
            factor = factor * self.op_law.microbatch[None]
        shape = jnp.broadcast_shapes(self.row.shape, common.ids.shape)
        members = jnp.arange(count, dtype=jnp.uint32).reshape((count,) + (1,) * len(shape))

        def run(carry, slot):
            alone, together, opened, beside = carry
            number, kernel, does = slot
            counter = (op.astype(jnp.uint32) * np.uint32(longest) + number) * np.uint32(count)
            ids = jnp.broadcast_to(common.ids, (count, *shape))
            drawn = normals(common.key, ids, counter[None] + members, dtype)
            kind = jnp.broadcast_to(common.kind[kernel], shape)[None]
            drawn = look_up(common.common.residuals, kind, drawn) * common.mean[kernel][None]
            drawn = jnp.where(kernel[None] >= 0, drawn, 0)
            slowed = jnp.where(common.on_network[kernel], common.regimes, 1)
            if slowdowns is not None:
                alone, beside = _beside(slowdowns, alone, beside, slot, drawn[0] * slowed)
                together, opened = _outer(slowdowns, together, opened, beside[1], slot)
            closes = does == CLOSES
            alone = alone + jnp.where(does[None] == ALONE, factor * drawn, 0)
            together = together + jnp.where(closes, jnp.max(alone, axis=0) + drawn[0] * slowed, 0)
            return (jnp.where(closes[None], 0, alone), together, opened, beside), None

        start = jnp.zeros((count, *shape), dtype), *(jnp.zeros(shape, dtype) for _ in range(2))
        beside = None if slowdowns is None else jnp.zeros((3, *shape), dtype)
        sequence = steps[self.row]  # (..., longest, 2)
        slots = (
            jnp.arange(longest, dtype=jnp.uint32),
            *(jnp.moveaxis(sequence[..., k], -1, 0) for k in range(2)),
        )
        (_, together, *_), _ = lax.scan(run, (*start, beside), slots)
        return together


def _beside(slowdowns: Float[Array, "branches 2"], alone, beside, slot, drawn):
    """The next kernel in branches: how long each member has computed, and for the branches, their
    start, the longest row of collectives, and the length of the current row.
    """
    _, which, does = slot
    start, longest, row = beside
    begins = does == STARTS
    start = jnp.where(begins, jnp.max(alone, axis=0), start)
    row = row + jnp.where(does == BESIDE, drawn, 0)
    longest = jnp.where(does == ROW_ENDS, jnp.maximum(longest, row), longest)
    row = jnp.where(begins | (does == ROW_ENDS), 0, row)
    alpha, beta = jnp.moveaxis(slowdowns[which], -1, 0)
    by_communication = (start + longest)[None] + beta[None] * (alone - start[None])
    end = jnp.maximum(by_communication, alone + (alpha * longest)[None])
    alone = jnp.where((does == MEETS)[None], end, alone)
    return alone, jnp.stack([start, jnp.where(begins, 0, longest), row])


def _outer(slowdowns: Float[Array, "branches 2"], together, opened, longest, slot):
    """When a block and the collectives that overlap with it have ended, and when they started."""
    _, which, does = slot
    alpha, beta = jnp.moveaxis(slowdowns[which], -1, 0)
    taken = together - opened
    end = opened + jnp.maximum(longest + beta * taken, taken + alpha * longest)
    together = jnp.where(does == JOINS, end, together)
    return together, jnp.where(does == OPENS, together, opened)
