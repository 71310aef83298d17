"""The core: samples of one replica of the pipeline."""

import functools as ft
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from ..maxplus import Latencies, propagate
from ..program import Program, network_probabilities, stall_probabilities
from ._kernels import kernel_latency, kernel_parameters, member_factors
from ._plan import Plan, latency, look_up, look_up_one, make_plan, row_laws
from ._random import KeyData, counters, fold, key_data, normals, uniforms


# Samples of a tile: all work is cut into pieces of this size.
TILE = 4096

# Streams of random numbers that a replica sample uses, each with a key of its own.
OPS, RANKS, MICROBATCHES, STALLS, MEMBERS, LEAD = range(6)


class Axes(eqx.Module):
    """Which draws of a replica sample are given from outside: for each, the row of the scores that
    takes its place; their number for none. Dynamic, for they depend on the values of the
    parameters.

    **Attributes:**

    - `ops`: `(levels, width)`.
    - `ranks`: `(ranks,)`, of the factor of each pipeline rank's slowest GPU.
    - `microbatches`: `(microbatches,)`.
    """

    ops: Int[Array, "levels width"]
    ranks: Int[Array, " ranks"]
    microbatches: Int[Array, " microbatches"]


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
    given: tuple[Axes, Float[Array, "axes samples"]] | None = None,
    gpu_ids: UInt32[Array, " samples"] | None = None,
    slowest: Float[Array, "ranks samples"] | None = None,
) -> Float[Array, "ranks samples"]:
    """`sample_replica_ends` from a plan, with the strata of the samples given, and the scores of
    some draws. Samples of one `gpu_id`, their own by default, run on the same GPUs. The factors of
    the `slowest` GPU of each rank may be given too.
    """
    gpus = (gpu_ids, slowest)
    latencies = replica_latencies(plan, sample_ids, key, regimes, stalls, given, gpus)
    return propagate(plan.program.levels, latencies, sample_ids.shape[0], plan.mean.dtype)


def replica_latencies(
    plan: Plan, sample_ids, key: KeyData, regimes, stalls, given=None, gpus=(None, None)
) -> Latencies:
    """The latencies of all ops of the samples. See `replica_ends`."""
    width = plan.program.levels.ops.value.shape[1]
    return Latencies(
        **_tables(plan, sample_ids, key, regimes, stalls, given, *gpus),
        noise=ft.partial(_noise, width, plan.mean.dtype),
        noise_arguments=(fold(key, OPS), sample_ids),
    )


def _noise(width: int, dtype, arguments, level, lane):
    """The scores of lanes of a level."""
    key, sample_ids = arguments
    return normals(key, sample_ids, level * np.uint32(width) + lane, dtype)


def _tables(
    plan: Plan, sample_ids, key, regimes, stalls, given, gpu_ids, slowest
) -> dict[str, Any]:
    """What the latencies of the ops are made of, as fields of `maxplus.Latencies`."""
    gpu_ids = sample_ids if gpu_ids is None else gpu_ids
    program, dtype = plan.program, plan.mean.dtype
    per_kernel = program.resolution == "kernel"
    members = None
    if per_kernel:
        members = member_factors(plan, gpu_ids, fold(key, MEMBERS))
        slowest = jnp.max(members, axis=0)
    elif slowest is None and plan.slowest is not None:
        z = normals(fold(key, RANKS), gpu_ids, counters(program.num_ranks), dtype)
        z = z if given is None else _replaced(z, given[0].ranks, given[1])
        slowest = look_up_one(plan.slowest, z)
        if program.adjustment is not None:
            slowest = 1 + program.adjustment.gpu[:, None] * (slowest - 1)
    # Laws are the same for all samples where neither GPUs nor the network make a difference.
    if slowest is None:
        slowest = jnp.ones((program.num_ranks, 1), dtype)
    if plan.moments.shape[2] == 1:
        regimes = jnp.zeros((1,), jnp.int32)
    number = max(slowest.shape[1], regimes.shape[0])
    # Communication has no GPU; its rank is -1, the last row.
    slowest = jnp.broadcast_to(slowest, (program.num_ranks, number))
    slowest = jnp.concatenate([slowest, jnp.ones((1, number), dtype)])
    regimes = jnp.broadcast_to(regimes, (number,))
    rows = program.rows
    laws = row_laws(plan, rows.class_.value, slowest[rows.rank.value], plan.nodes, regimes)

    ops = program.levels.ops.value
    op_row = program.ops.row.value[ops]  # Padding lanes take the last op's row; nobody reads them.
    tables: dict[str, Any] = dict(laws)
    which = dict.fromkeys(laws, op_row)
    if plan.microbatch is not None:
        z = normals(fold(key, MICROBATCHES), sample_ids, counters(program.num_microbatches), dtype)
        z = z if given is None else _replaced(z, given[0].microbatches, given[1])
        ones = jnp.ones((1, sample_ids.shape[0]), dtype)
        tables["microbatch"] = jnp.concatenate([look_up_one(plan.microbatch, z), ones])
        compute = program.blocks.compute.value[rows.class_.value[op_row]]
        # Communication does not depend on the data: the last row.
        which["microbatch"] = np.where(
            compute, program.ops.microbatch.value[ops], program.num_microbatches
        )
    if program.adjustment is not None:
        group = program.adjustment.group.value[ops]
        for name in ("latency", "spread"):
            tables[f"{name} factor"] = getattr(program.adjustment, name)[:, None]
            which[f"{name} factor"] = group
    if given is not None:
        axes, scores = given
        # The last row stands for "not given".
        tables["given"] = jnp.concatenate([scores, jnp.full_like(scores[:1], jnp.nan)])
        which["given"] = axes.ops
    for_all = {}
    for j, (place, pause) in enumerate(_stalls(plan, sample_ids, key, stalls)):
        for_all |= {f"stalled{j}": place, f"pause{j}": pause}
    shared, op_latency = plan.residuals, _op_latency
    if members is not None:
        for m, factor in enumerate(members):
            tables[f"member{m}"] = factor
            which[f"member{m}"] = np.maximum(rows.rank.value, 0)[op_row]
        tables["row"] = jnp.arange(len(rows.rank.value), dtype=jnp.int32)[:, None]
        which["row"] = op_row
        words = fold(key, MEMBERS, 1)
        for_all |= {"id": sample_ids, "regime": regimes, "key0": words[:1], "key1": words[1:]}
        shared = kernel_parameters(plan)
        op_latency = ft.partial(_op_latency, kernels=kernel_latency(program))
    tables |= {name: value[None, :] for name, value in for_all.items()}
    which |= dict.fromkeys(for_all, np.zeros_like(ops))
    return {
        "tables": tables,
        "rows": {name: jnp.asarray(row, jnp.int32) for name, row in which.items()},
        "shared": shared,
        "latency": op_latency,
    }


def _replaced(z, axis: Int[Array, " draws"], scores):
    """The rows of `z`, or of the scores that take their place."""
    taken = (axis < len(scores))[:, None]
    return jnp.where(taken, scores[jnp.minimum(axis, len(scores) - 1)], z)


def _op_latency(op, mine, shared, z, kernels=None):
    """The latency of an op: see `maxplus.Latencies`."""
    if "given" in mine:
        z = jnp.where(jnp.isnan(mine["given"]), z, mine["given"])
    if kernels is None:
        seconds = latency(mine, shared, z)
    else:
        seconds = kernels(op, mine, shared, z)
    if "latency factor" in mine:
        seconds = seconds * mine["latency factor"]
    if "microbatch" in mine:
        seconds = seconds * mine["microbatch"]
    for j in range(sum(name.startswith("pause") for name in mine)):
        seconds = seconds + jnp.where(op == mine[f"stalled{j}"], mine[f"pause{j}"], 0)
    return seconds


def _stalls(plan: Plan, sample_ids, key, stalls) -> list[tuple[Any, Any]]:
    """Where (which op, or -2) and for how long each of a sample's stalls pauses it."""
    if plan.stall_shares is None or plan.stall_sizes is None:
        return []
    program = plan.program
    ops = jnp.asarray(program.stall_ops.value, jnp.int32)
    kinds = jnp.asarray(program.stall_kinds.value, jnp.int32)
    pauses = []
    for j in range(max(stratum.stalls for stratum in program.strata)):
        dtype = plan.mean.dtype
        u, _ = uniforms(fold(key, STALLS), sample_ids, 2 * j, dtype)
        z = normals(fold(key, STALLS), sample_ids, jnp.uint32(2 * j + 1), dtype)
        shares = lax.stop_gradient(plan.stall_shares)
        entry = jnp.clip(jnp.searchsorted(shares, u), 0, len(ops) - 1)
        where = jnp.where(stalls > j, ops[entry], -2)
        pauses.append((where, look_up(plan.stall_sizes, kinds[entry], z)))
    return pauses


def poisson_stalls(
    program: Program, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> Int[Array, " samples"]:
    """The number of stalls of each sample by its law, for replicas that are all simulated."""
    probabilities = stall_probabilities(program)
    counter = 2 * max(stratum.stalls for stratum in program.strata)
    u, _ = uniforms(fold(key, STALLS), sample_ids, counter, probabilities.dtype)
    return jnp.searchsorted(jnp.cumsum(probabilities)[:-1], u, side="right").astype(jnp.int32)
