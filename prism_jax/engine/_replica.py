"""The core: samples of one replica of the pipeline."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from ..maxplus import propagate
from ..program import Program, network_probabilities, stall_probabilities
from ._kernels import kernel_latency, member_factors
from ._plan import Plan, latency, look_up, look_up_one, make_plan, row_laws
from ._random import KeyData, fold, key_data, normals, uniforms


# Samples of a tile: all work is cut into pieces of this size.
TILE = 1024

# Streams of random numbers that a replica sample uses, each with a key of its own.
OPS, RANKS, MICROBATCHES, STALLS, MEMBERS = range(5)


@eqx.filter_jit
def sample_replica_ends(
    program: Program, sample_ids: UInt32[Array, " samples"], key: PRNGKeyArray
) -> Float[Array, "ranks samples"]:
    """Samples when each pipeline rank of one replica ends its last op.

    The step factor, which all replicas share, is left out; the network's regime and the number of
    stalls are those of the sample's stratum (see `sample_weights`). Pure: it can be jitted, mapped
    with `vmap` over keys and parameters, and differentiated in reverse mode with respect to the
    program's parameters.

    **Arguments:**

    - `program`: the step.
    - `sample_ids`: which samples; the same id and key always give the same sample.
    - `key`: a `jax.random` key.

    **Returns:**

    Ends in seconds.
    """
    plan, words = make_plan(program), key_data(key)
    number = sample_ids.shape[0]
    # In tiles of one size, and more than one: XLA compiles a loop of one turn as something else,
    # and the bits must not depend on the number of samples.
    padding = max(-number % TILE, 2 * TILE - number)
    tiles = jnp.pad(sample_ids, (0, padding)).reshape(-1, TILE)

    def one_tile(ids):
        return replica_ends(plan, ids, words, *strata_of(program, ids))

    ends = lax.map(one_tile, tiles)
    return jnp.moveaxis(ends, 0, 1).reshape(ends.shape[1], -1)[:, :number]


def strata_of(
    program: Program, sample_ids: UInt32[Array, " samples"]
) -> tuple[Int[Array, " samples"], Int[Array, " samples"]]:
    """The regime of the network and the number of stalls of each sample.

    Strata are dealt out along a Weyl sequence, so any run of consecutive ids has each in
    proportion to its share.
    """
    which = stratum_of(program, sample_ids)
    regimes = jnp.asarray(np.array([s.regime for s in program.strata], np.int32))
    stalls = jnp.asarray(np.array([s.stalls for s in program.strata], np.int32))
    return regimes[which], stalls[which]


def stratum_of(program: Program, sample_ids: UInt32[Array, " samples"]) -> Int[Array, " samples"]:
    """The number of each sample's stratum among `program.strata`."""
    shares = np.cumsum([s.share for s in program.strata])[:-1]
    bounds = np.minimum(shares * 2.0**32, 2.0**32 - 1).astype(np.uint32)
    sequence = sample_ids * np.uint32(0x9E3779B9)
    which = jnp.zeros(sample_ids.shape, jnp.int32)
    for bound in bounds:
        which = which + (sequence >= bound).astype(jnp.int32)
    return which


def stratum_weights(program: Program) -> Float[Array, " strata"]:
    """The weight of each sample of a stratum within its regime of the network: the probability of
    its number of stalls over its share of the regime's samples. Differentiable in the rates.
    """
    probabilities = stall_probabilities(program)
    regimes = network_probabilities(program).shape[0]
    total = [sum(s.share for s in program.strata if s.regime == g) for g in range(regimes)]
    shares = jnp.asarray([s.share / total[s.regime] for s in program.strata], probabilities.dtype)
    return probabilities[np.array([s.stalls for s in program.strata])] / shares


def replica_ends(
    plan: Plan,
    sample_ids: UInt32[Array, " samples"],
    key: KeyData,
    regimes: Int[Array, " samples"],
    stalls: Int[Array, " samples"],
) -> Float[Array, "ranks samples"]:
    """`sample_replica_ends` from a plan, with the strata of the samples given."""
    program = plan.program
    dtype = plan.mean.dtype
    num_samples = sample_ids.shape[0]
    rows = program.rows

    members = None
    if program.resolution == "kernel":
        members = member_factors(plan, sample_ids, fold(key, MEMBERS))
        slowest = jnp.max(members, axis=0)
    else:
        slowest = _slowest_factors(plan, sample_ids, key)
    # Communication has no GPU; its rank is -1, the last row.
    slowest = jnp.concatenate([slowest, jnp.ones((1, num_samples), dtype)])
    factors = slowest[rows.rank.value]
    laws, kinds = row_laws(plan, rows.class_.value, factors, plan.nodes, regimes)
    microbatches = _microbatch_factors(plan, sample_ids, key)
    paused = _stalls(plan, sample_ids, key, stalls)

    ops = program.levels.ops.value
    width = ops.shape[1]
    pairs = (width + 1) // 2
    op_row = program.ops.row.value[ops]  # Padding lanes take the last op's row; nobody reads them.
    compute = program.blocks.compute.value[rows.class_.value[op_row]]
    last = program.num_microbatches
    op_microbatch = np.where(compute, program.ops.microbatch.value[ops], last)
    per_level = (
        jnp.asarray(op_row),
        jnp.asarray(kinds[op_row]),
        jnp.asarray(op_microbatch),
        jnp.arange(len(ops), dtype=jnp.uint32),
    )
    draws = fold(key, OPS)

    def level_latency(op, level):
        row, kind, microbatch, number = level
        counters = number * np.uint32(pairs) + jnp.arange(pairs, dtype=jnp.uint32)
        z = normals(draws, sample_ids, counters, dtype)[:width]
        latencies = latency(plan, laws[:, row], kind, z)
        if members is not None:
            latencies = kernel_latency(
                plan, members, row, latencies, sample_ids, fold(key, MEMBERS, number + 1), regimes
            )
        if microbatches is not None:
            latencies = latencies * microbatches[microbatch]
        if paused is not None:
            where, pause = paused
            for place, size in zip(where, pause, strict=True):
                latencies = latencies + jnp.where(op[:, None] == place[None, :], size[None, :], 0)
        return latencies

    return propagate(program.levels, level_latency, per_level, jnp.zeros(num_samples, dtype))


def _slowest_factors(plan: Plan, sample_ids, key) -> Float[Array, "ranks samples"]:
    """The factor of the slowest GPU of each pipeline rank."""
    number = plan.program.num_ranks
    if plan.slowest is None:
        return jnp.ones((number, sample_ids.shape[0]), plan.mean.dtype)
    counters = jnp.arange((number + 1) // 2, dtype=jnp.uint32)
    z = normals(fold(key, RANKS), sample_ids, counters, plan.mean.dtype)[:number]
    return look_up_one(plan.slowest, z)


def _microbatch_factors(plan: Plan, sample_ids, key) -> Float[Array, "rows samples"] | None:
    """The factor of each microbatch's data, and a last row of ones for communication."""
    if plan.microbatch is None:
        return None
    number = plan.program.num_microbatches
    counters = jnp.arange((number + 1) // 2, dtype=jnp.uint32)
    z = normals(fold(key, MICROBATCHES), sample_ids, counters, plan.mean.dtype)[:number]
    one = jnp.ones((1, sample_ids.shape[0]), plan.mean.dtype)
    return jnp.concatenate([look_up_one(plan.microbatch, z), one])


def _stalls(plan: Plan, sample_ids, key, stalls) -> tuple[list, list] | None:
    """Where (which op, or -2) and for how long each of a sample's stalls pauses it."""
    if plan.stall_shares is None or plan.stall_sizes is None:
        return None
    program = plan.program
    ops = jnp.asarray(program.stall_ops.value, jnp.int32)
    kinds = jnp.asarray(program.stall_kinds.value, jnp.int32)
    where, pause = [], []
    for j in range(max(stratum.stalls for stratum in program.strata)):
        dtype = plan.mean.dtype
        u, _ = uniforms(fold(key, STALLS), sample_ids, 2 * j, dtype)
        counter = jnp.full((1,), 2 * j + 1, jnp.uint32)
        z = normals(fold(key, STALLS), sample_ids, counter, dtype)[0]
        shares = lax.stop_gradient(plan.stall_shares)
        entry = jnp.clip(jnp.searchsorted(shares, u), 0, len(ops) - 1)
        where.append(jnp.where(stalls > j, ops[entry], -2))
        pause.append(look_up(plan.stall_sizes, kinds[entry], z))
    return where, pause


def poisson_stalls(
    program: Program, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> Int[Array, " samples"]:
    """The number of stalls of each sample by its law, for replicas that are all simulated."""
    probabilities = stall_probabilities(program)
    counter = 2 * max(stratum.stalls for stratum in program.strata)
    u, _ = uniforms(fold(key, STALLS), sample_ids, counter, probabilities.dtype)
    return jnp.searchsorted(jnp.cumsum(probabilities)[:-1], u, side="right").astype(jnp.int32)
