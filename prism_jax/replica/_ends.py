"""Samples of one replica of the pipeline: what is drawn for each, and when its ops end."""

import functools as ft
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from .. import _devices
from ..latency import cube_normal
from ..maxplus import Latencies, propagate, propagate_to
from ..op_law import ClassLaw, Common, OpLaw, Pause, class_laws, look_up, look_up_one
from ..program import Program
from ..random import KeyData, Stream, counters, fold, key_data, normal_pairs, normals, uniforms
from ._plan import Plan, make_plan, stratum_of


# Samples of a tile: all work is cut into pieces of this size.
TILE = 4096
# Half of the samples are drawn by the law itself, so that no weight exceeds two.
_SHIFTED = 0.5


class Axes(eqx.Module):
    """Which draws of a replica sample are replaced by given scores: for each draw, the row of the
    scores that replaces it, or the number of rows if none does. Dynamic, because the leading axes
    depend on the values of the parameters.

    **Attributes:**

    - `ops`: the rows for ops, in their lanes or in one line.
    - `ranks`: `(ranks,)`, the rows for the factor of each pipeline rank's slowest GPU.
    - `microbatches`: `(microbatches,)`, the rows for microbatches.
    - `worker_steps`: `(ranks,)`, the rows for the factor of each pipeline rank in its step; `None`
        if there are none.
    - `loads`: `(pairs,)`, the rows for the loads of each stage and microbatch; `None` if loads are
        equal.
    """

    ops: Int[Array, "*places"]
    ranks: Int[Array, " ranks"]
    microbatches: Int[Array, " microbatches"]
    worker_steps: Int[Array, " ranks"] | None
    loads: Int[Array, " pairs"] | None


class Lead(eqx.Module):
    """The leading axes of a program, along which importance sampling shifts samples.

    **Attributes:**

    - `axes`: which draws are leading axes.
    - `order`: the same draws by number, the one along which the end rises fastest first; -1 for
        none.
    - `direction`: the mean gradient of a replica's end along them, of unit length.
    - `shift`: how far half of the samples are shifted along it.
    """

    axes: Axes
    order: Int[np.ndarray, " axes"]
    direction: Float[Array, " axes"]
    shift: Float[Array, ""]


class Sampled(eqx.Module):
    """What is known of some replica samples before their ops are drawn.

    **Attributes:**

    - `ids`: the ids of the samples.
    - `regimes`, `stalls`: the regime of the network, and the number of stalls.
    - `leading`: the scores of some draws, and which draws; `None` for none.
    - `gpu_ids`: samples with the same id run on the same GPUs; by default, each has its own.
    - `slowest`: the factors of the slowest GPU of each rank, if they are known.
    """

    ids: UInt32[Array, " samples"]
    regimes: Int[Array, " samples"]
    stalls: Int[Array, " samples"]
    leading: tuple[Axes, Float[Array, "axes samples"]] | None = None
    gpu_ids: UInt32[Array, " samples"] | None = None
    slowest: Float[Array, "ranks samples"] | None = None


def by_strata(plan: Plan, sample_ids: UInt32[Array, " samples"], leading: Any = None) -> Sampled:
    """Samples in the strata of their ids."""
    strata = plan.structure.strata
    stratum = stratum_of(strata, sample_ids)
    return Sampled(sample_ids, strata.regime[stratum], strata.stalls[stratum], leading)


def led(
    plan: Plan, lead: Lead | None, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> tuple[Sampled, Float[Array, " samples"]]:
    """Samples with the scores of their leading axes, if there are any, and their likelihoods."""
    leading, likelihood = None, jnp.ones(sample_ids.shape, jnp.float32)
    if lead is not None:
        scores, likelihood = _shifted_scores(lead, sample_ids, key)
        leading = lead.axes, scores
    return by_strata(plan, sample_ids, leading), likelihood.astype(jnp.float32)


def _shifted_scores(
    lead: Lead, sample_ids: UInt32[Array, " samples"], key: KeyData
) -> tuple[Float[Array, "axes samples"], Float[Array, " samples"]]:
    """Scores of the leading axes, where every other sample is shifted, and the likelihood ratio of
    the law to this mixture (Hesterberg, "Weighted average importance sampling and defensive mixture
    distributions", 1995).
    """
    number = lead.direction.shape[0]
    z = normals(fold(key, Stream.LEAD), sample_ids, counters(number), lead.direction.dtype)
    moved = jnp.where(sample_ids % 2 == 1, lead.shift, 0)
    z = z + lead.direction[:, None] * moved[None, :]
    along = jnp.sum(lead.direction[:, None] * z, axis=0)
    ratio = jnp.exp(lead.shift * along - lead.shift**2 / 2)
    return z, 1 / ((1 - _SHIFTED) + _SHIFTED * ratio)


def sample_replica_ends(
    program: Program, sample_ids: UInt32[Array, " samples"], key: "jax.Array"
) -> Float[Array, "sinks samples"]:
    """Samples when each sink of one replica ends. The sinks of a pipeline rank are the ops whose
    gradients are reduced while the backward goes on, and then its last op. If nothing is reduced
    and there are more than 16 ranks, there is one sink, the end of all of them.

    The step factor, which all replicas share, is not applied. The network's regime and the number
    of stalls are those of the stratum of each sample. The function is pure: it works under
    `jax.jit`, under `jax.vmap` over keys and parameters, and under reverse-mode differentiation
    with respect to the parameters of the program: those that `eqx.is_inexact_array` tells from the
    rest, which is not traced. Outside of these, each call makes the tables of
    the program's laws anew, which takes some tenths of a second; within `jax.jit`, they are
    compiled, which takes seconds once.

    **Arguments:**

    - `program`: the step.
    - `sample_ids`: the ids of the samples. The same id and key always give the same sample.
    - `key`: a `jax.random` key.

    **Returns:**

    The end of each sink in each sample, in seconds.
    """
    ends = _sampled_ends(make_plan(program), sample_ids, key_data(key))
    return ends[: program.sinks.number]


@eqx.filter_jit
def _sampled_ends(plan: Plan, sample_ids: UInt32[Array, " samples"], words: KeyData):
    number = sample_ids.shape[0]
    # In tiles of one size, and more than one: XLA compiles a loop of one turn as something else,
    # and the bits must not depend on the number of samples.
    padding = max(-number % TILE, 2 * TILE - number)
    tiles = jnp.pad(sample_ids, (0, padding)).reshape(-1, TILE)
    ends = lax.map(lambda ids: replica_ends(plan, by_strata(plan, ids), words), tiles)
    return jnp.moveaxis(ends, 0, 1).reshape(ends.shape[1], -1)[:, :number]


def replica_ends(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "sinks samples"]:
    """`sample_replica_ends` from a plan, for as many sinks as there is room for."""
    latencies = replica_latencies(plan, sampled, key)
    return propagate(plan.structure.replica.levels, latencies, len(sampled.ids), plan.dtype)


def replica_end(
    plan: Plan, sampled: Sampled, sink: Int[Array, " samples"], key: KeyData
) -> Float[Array, " samples"]:
    """The end of one sink in each sample: see `propagate_to`."""
    latencies = replica_latencies(plan, sampled, key)
    return propagate_to(plan.structure.replica.levels, latencies, sink, plan.dtype)


def replica_latencies(plan: Plan, sampled: Sampled, key: KeyData) -> Latencies:
    """The latencies of all ops of the samples."""
    structure = plan.structure
    slowest = _slowest(plan, sampled, key)
    worker_step = _worker_steps(plan, sampled, key)
    other_gpus = _other_gpus(plan, sampled, key)
    if structure.classes.worker is not None and worker_step is not None:
        # The moments are those given the product of both.
        slowest, worker_step = slowest * worker_step, None
    law = _class_law(plan, sampled.regimes, slowest, worker_step, other_gpus)
    ops, levels = structure.replica.ops, structure.replica.levels
    if levels is not None:  # In their lanes, and not in one line.
        ops = jax.tree.map(ft.partial(jnp.reshape, shape=levels.ops.shape), ops)
    rows = jax.tree.map(lambda _: ops.row, law)
    law, rows = OpLaw(law), OpLaw(rows)
    if plan.tables.microbatch is not None:
        assert plan.tables.loading is not None
        loading = _by_regime(plan.tables.loading[structure.replica.rows.class_], sampled.regimes)
        law = replace(law, microbatch=_microbatches(plan, sampled, key), loading=loading)
        rows = replace(rows, microbatch=ops.microbatch, loading=ops.row)
    if ops.load is not None:
        assert plan.tables.load is not None
        sway = _by_regime(plan.tables.load[0, structure.replica.rows.class_], sampled.regimes)
        law = replace(law, load=_loads(plan, sampled, key), sway=sway)
        rows = replace(rows, load=ops.load, sway=ops.row)
    if (adjustment := plan.tables.adjustment) is not None:
        spread = replace(law.class_law, spread=adjustment.spread[:, None])
        law = replace(law, factor=adjustment.latency[:, None], class_law=spread)
        spread = replace(rows.class_law, spread=ops.group)
        rows = replace(rows, factor=ops.group, class_law=spread)
    if sampled.leading is not None:
        axes, scores = sampled.leading
        # The last row stands for "not given".
        law = replace(law, score=jnp.concatenate([scores, jnp.full_like(scores[:1], jnp.nan)]))
        rows = replace(rows, score=axes.ops)
    common = Common(
        plan.tables.residuals, pauses_of(plan, sampled.ids, sampled.regimes, sampled.stalls, key)
    )
    return Latencies(
        tables=law,
        rows=rows,
        common=common,
        noise=ft.partial(_noise, plan.dtype),
        noise_arguments=(fold(key, Stream.OPS), sampled.ids),
    )


def _by_regime(table: Float[Array, "rows regimes"], regimes: Int[Array, " samples"]):
    """The column of each sample, or a single one if there is one regime."""
    return table[:, regimes] if table.shape[1] > 1 else table


def _class_law(plan: Plan, regimes, slowest, worker_step, other_gpus) -> ClassLaw:
    """The laws of all rows in each sample, or in a single one if samples do not differ."""
    replica, nodes = plan.structure.replica, plan.tables.nodes
    # Laws are the same for all samples where neither compute nor the network makes a difference.
    if plan.tables.moments.shape[2] == 1:
        regimes = jnp.zeros((1,), jnp.int32)
    drawn = slowest, worker_step, other_gpus
    number = max(len(regimes), *(factor.shape[1] for factor in jax.tree.leaves(drawn)))
    regimes = jnp.broadcast_to(regimes, (number,))

    def of_rows(factor):
        factor = jnp.broadcast_to(factor, (len(factor), number))
        # Communication has no GPU: the last row.
        factor = jnp.concatenate([factor, jnp.ones((1, number), plan.dtype)])
        return factor[replica.rows.rank]

    slowest, *of_others = jax.tree.map(of_rows, drawn)
    of_plan = plan.structure.classes, plan.tables, replica.rows.class_, replica.mixed
    return class_laws(*of_plan, slowest, nodes, regimes, *of_others)


def _noise(dtype, arguments, pair, arranged):
    key, sample_ids = arguments

    def draw(pair):
        return arranged(*normal_pairs(key, sample_ids, pair, dtype))

    if _devices.platform() != "cpu":
        return draw(pair)
    # A branch that is always taken, which XLA does not know: without it, a loop on a CPU over the
    # tables of several programs would draw the same numbers again for each of them.
    taken = pair.ravel()[0] != np.uint32(2**32 - 1)
    nans, shapes = ft.partial(jnp.full_like, fill_value=jnp.nan), jax.eval_shape(draw, pair)
    return lax.cond(taken, draw, lambda _: jax.tree.map(nans, shapes), pair)


def _scores(
    plan: Plan, sampled: Sampled, key: KeyData, stream: Stream, number: int, axis: Any = None
) -> Float[Array, "draws samples"]:
    """So many standard normals of a stream, or the given scores that replace them; `axis` is their
    part of [`Axes`][]. Those of GPUs are the same wherever samples run on the same GPUs.
    """
    of_gpus = stream in (Stream.RANKS, Stream.OTHER_GPUS)
    ids = sampled.gpu_ids if of_gpus and sampled.gpu_ids is not None else sampled.ids
    z = normals(fold(key, stream), ids, counters(number), plan.dtype)
    if sampled.leading is None or axis is None:
        return z
    scores = sampled.leading[1]
    taken = (axis < len(scores))[:, None]
    return jnp.where(taken, scores[jnp.minimum(axis, len(scores) - 1)], z)


def _slowest(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "ranks samples"]:
    """The factor of the slowest GPU of each rank; a single column if GPUs are equal."""
    ranks = plan.structure.ranks
    if sampled.slowest is not None:
        return sampled.slowest
    if plan.tables.slowest is None:
        return jnp.ones((ranks, 1), plan.dtype)
    axis = sampled.leading and sampled.leading[0].ranks
    slowest = look_up_one(
        plan.tables.slowest, _scores(plan, sampled, key, Stream.RANKS, ranks, axis)
    )
    if plan.tables.adjustment is not None:
        slowest = 1 + plan.tables.adjustment.gpu[:, None] * (slowest - 1)
    return slowest


def _other_gpus(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "ranks samples"] | None:
    """The score of each rank's GPUs other than the slowest."""
    if plan.tables.shared is None or not plan.structure.replica.mixed.collapsed:
        return None
    return _scores(plan, sampled, key, Stream.OTHER_GPUS, plan.structure.ranks)


def _worker_steps(
    plan: Plan, sampled: Sampled, key: KeyData
) -> Float[Array, "ranks samples"] | None:
    """The factor of each rank in its step, on whichever GPUs it runs."""
    if plan.tables.worker_step is None:
        return None
    axis = sampled.leading and sampled.leading[0].worker_steps
    z = _scores(plan, sampled, key, Stream.WORKER_STEPS, plan.structure.ranks, axis)
    return look_up_one(plan.tables.worker_step, z)


def _microbatches(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "rows samples"]:
    """The factor of each microbatch's data, and a final one for ops without a microbatch."""
    replica, table = plan.structure.replica, plan.tables.microbatch
    assert table is not None
    if replica.set_length:
        factors = _sets(plan, sampled, key)
    else:
        axis = sampled.leading and sampled.leading[0].microbatches
        number = replica.num_microbatches
        z = _scores(plan, sampled, key, Stream.MICROBATCHES, number, axis)
        factors = look_up_one(table, z)
    return jnp.concatenate([factors, jnp.ones((1, len(sampled.ids)), plan.dtype)])


def _loads(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "rows samples"]:
    """The standardised loads of each stage and microbatch, and a final zero for ops without."""
    class_, table = plan.structure.replica.load_class, plan.tables.load
    assert class_ is not None
    assert table is not None
    axis = sampled.leading and sampled.leading[0].loads
    z = _scores(plan, sampled, key, Stream.LOADS, len(class_), axis)
    loads = cube_normal(z, _by_regime(table[1, class_], sampled.regimes))
    return jnp.concatenate([loads, jnp.zeros_like(loads[:1])])


def _sets(plan: Plan, sampled: Sampled, key: KeyData) -> Float[Array, "rows samples"]:
    """The factors of microbatches, where those of one replica in one step are drawn together."""
    factors, length = plan.tables.microbatch, plan.structure.replica.set_length
    assert factors is not None
    microbatch = np.arange(plan.structure.replica.num_microbatches)
    places = factors.shape[1] - length + 1
    words = fold(key, Stream.MICROBATCHES)
    sets = counters(int(microbatch[-1]) // length + 1)
    u = uniforms(words, sampled.ids, sets, plan.dtype)
    most = factors.shape[0] * places - 1
    drawn = jnp.minimum((u * (most + 1)).astype(jnp.int32), most)
    first = drawn // places * factors.shape[1] + drawn % places
    chosen = first[microbatch // length] + jnp.asarray(microbatch % length, jnp.int32)[:, None]
    return factors.reshape(-1)[chosen]


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
