"""`resolution="kernel"`: every kernel of every member, drawn by itself. A check of the collapse."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ._plan import NUM_SCORES, SCORE_RANGE, Plan, look_up, look_up_one
from ._random import KeyData, normals


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
    counters = jnp.arange((number + 1) // 2, dtype=jnp.uint32)
    z = normals(key, sample_ids, counters, plan.mean.dtype)[:number]
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=z.dtype)
    table = (rank.from_normal(scores) / rank.mean()).astype(z.dtype)
    return look_up_one(table, z).reshape(shape)


def kernel_latency(
    plan: Plan,
    members: Float[Array, "members ranks samples"],
    row: Int[Array, " width"],
    otherwise: Float[Array, "width samples"],
    sample_ids: UInt32[Array, " samples"],
    key: KeyData,
    regimes: Int[Array, " samples"],
) -> Float[Array, "width samples"]:
    """Latencies of one level's ops, kernel by kernel; `otherwise` for those that are one kernel."""
    program = plan.program
    tables = plan.residuals
    assert tables is not None
    classes = program.rows.class_.value
    longest = max(len(program.sequences[c].value) for c in classes)
    # Kernel (-1: none) and whether the members wait for one another after it, for each row.
    steps = np.full((len(classes), longest, 2), (-1, 0), np.int32)
    for r, c in enumerate(classes):
        sequence = program.sequences[c].value
        steps[r, : len(sequence)] = sequence
    network = program.variability.network
    regime = jnp.ones((1,), plan.mean.dtype) if network is None else network.factors()
    exposed = jnp.asarray(program.latencies.on_network.value)
    kind = jnp.asarray(program.latencies.kind.value)
    mean = program.latencies.mean
    rank = jnp.asarray(np.maximum(program.rows.rank.value, 0))[row]
    factor = members[:, rank]  # (members, width, samples)
    count, width, samples = factor.shape
    pairs = (count * width + 1) // 2

    def run(carry, slot):
        number, kernel, waits = slot
        alone, together = carry
        counters = number * np.uint32(pairs) + jnp.arange(pairs, dtype=jnp.uint32)
        z = normals(key, sample_ids, counters, mean.dtype)[: count * width]
        shape = look_up(tables, jnp.tile(kind[kernel], count)[:, None], z)
        drawn = shape.reshape(count, width, samples) * mean[kernel][None, :, None]
        drawn = jnp.where((kernel >= 0)[None, :, None], drawn, 0)
        closes = (waits == 1)[:, None]
        slowed = jnp.where(exposed[kernel][:, None], regime[regimes][None, :], 1)
        alone = alone + jnp.where(closes[None], 0, factor * drawn)
        together = together + jnp.where(closes, jnp.max(alone, axis=0) + drawn[0] * slowed, 0)
        return (jnp.where(closes[None], 0, alone), together), None

    start = (jnp.zeros_like(factor), jnp.zeros_like(otherwise))
    chosen = jnp.asarray(steps)[row]  # (width, longest, 2)
    slots = (jnp.arange(longest, dtype=jnp.uint32), chosen[:, :, 0].T, chosen[:, :, 1].T)
    (_, together), _ = lax.scan(run, start, slots)
    direct = jnp.asarray(program.blocks.direct.value[classes] >= 0)[row]
    return jnp.where(direct[:, None], otherwise, together)
