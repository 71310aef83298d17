"""`resolution="kernel"`: every kernel of every member, drawn by itself. A check of the collapse."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from ..program import Program
from ._plan import NUM_SCORES, SCORE_RANGE, Plan, latency, look_up, look_up_one
from ._random import KeyData, counters, normals


def member_factors(
    plan: Plan, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> Float[Array, "members ranks samples"]:
    """The factor of every GPU of every pipeline rank."""
    program = plan.program
    rank = program.variability.rank
    shape = (program.group_size, program.num_ranks, sample_ids.shape[0])
    if rank is None:
        return jnp.ones(shape, plan.mean.dtype)
    number = program.group_size * program.num_ranks
    z = normals(key, sample_ids, counters(number), plan.mean.dtype)
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=z.dtype)
    table = (rank.from_normal(scores) / rank.mean()).astype(z.dtype)
    return look_up_one(table, z).reshape(shape)


def kernel_parameters(plan: Plan) -> tuple[Any, Any, Any]:
    """What all ops share: tables of the kernels' laws, their means, the factors of the network."""
    network = plan.program.variability.network
    regimes = jnp.ones((1,), plan.mean.dtype) if network is None else network.factors()
    return plan.residuals, plan.program.latencies.mean, regimes


def kernel_latency(program: Program) -> Callable[..., Any]:
    """The latency of an op (see `maxplus.Latencies`), kernel by kernel.

    The tables that it reads are those of `row_laws`, `row`, the number of a row; `member`, one for
    each member, the factor of its GPU; `id`, `regime`, and `key`, two of them.
    """
    classes = program.rows.class_.value
    count = program.group_size
    longest = max(len(program.sequences[c].value) for c in classes)
    # Kernel (-1: none) and whether the members wait for one another after it, for each row.
    steps = np.full((len(classes), longest, 2), (-1, 0), np.int32)
    for r, c in enumerate(classes):
        sequence = program.sequences[c].value
        steps[r, : len(sequence)] = sequence
    alone = program.blocks.direct.value[classes] >= 0
    exposed = program.latencies.on_network.value
    kinds = program.latencies.kind.value

    def op_latency(op, mine, shared, z):
        tables, mean, regimes = shared
        factor = jnp.stack([mine[f"member{m}"] for m in range(count)])
        regime = regimes[mine["regime"]]
        row = mine["row"]
        key = jnp.stack([mine["key0"].reshape(-1)[0], mine["key1"].reshape(-1)[0]])
        shape = jnp.broadcast_shapes(row.shape, mine["id"].shape)
        members = jnp.arange(count, dtype=jnp.uint32).reshape((count,) + (1,) * len(shape))

        def run(carry, slot):
            alone, together = carry
            number, kernel, waits = slot
            counter = (op.astype(jnp.uint32) * np.uint32(longest) + number) * np.uint32(count)
            ids = jnp.broadcast_to(mine["id"], (count, *shape))
            drawn = normals(key, ids, counter[None] + members, mean.dtype)
            kind = jnp.broadcast_to(jnp.asarray(kinds)[kernel], shape)[None]
            drawn = look_up(tables, kind, drawn) * mean[kernel][None]
            drawn = jnp.where(kernel[None] >= 0, drawn, 0)
            closes = waits == 1
            slowed = jnp.where(jnp.asarray(exposed)[kernel], regime, 1)
            alone = alone + jnp.where(closes[None], 0, factor * drawn)
            together = together + jnp.where(closes, jnp.max(alone, axis=0) + drawn[0] * slowed, 0)
            return (jnp.where(closes[None], 0, alone), together), None

        start = (jnp.zeros((count, *shape), mean.dtype), jnp.zeros(shape, mean.dtype))
        sequence = jnp.asarray(steps)[row]  # (..., longest, 2)
        slots = (
            jnp.arange(longest, dtype=jnp.uint32),
            *(jnp.moveaxis(sequence[..., k], -1, 0) for k in range(2)),
        )
        (_, together), _ = lax.scan(run, start, slots)
        return jnp.where(jnp.asarray(alone)[row], latency(mine, tables, z), together)

    return op_latency
