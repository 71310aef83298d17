"""Max-plus propagation: an op starts when all it waits for has ended, and ends a latency later."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ._lanes import Lanes, followed, pack, words_of


# Levels that the derivative goes back through at once; what it holds of each is kept in a cache.
_LEVELS_AT_ONCE = 16
# Ends are counted anew from the latest one after so many levels: in single precision, a sum of 3e5
# equal latencies would drift by 0.4 %.
_LEVELS_OF_SUM = 1024
# Of all indices of lanes and slots.
_IN = "promise_in_bounds"


class AbstractOpLaw(eqx.Module):
    """The law of an op's latency, whose fields are arrays `(lanes, samples)`: elementwise."""

    @abc.abstractmethod
    def latency(self, op: Any, z: Any, common: Any) -> Any:
        """The latency in seconds, not negative.

        **Arguments:**

        - `op`: which op, `(lanes, 1)` or `(lanes, samples)`.
        - `z`: its noise, a standard normal, `(lanes, samples)`.
        - `common`: what all ops share.
        """


class Latencies(eqx.Module):
    """How the latency of an op comes about, where it is needed and from little memory.

    An op's latency is a function of one row of each table, of what all ops share, and of noise of
    its own, which is made again rather than kept.

    **Attributes:**

    - `tables`: a law of arrays `(rows, samples)`, or `(rows, 1)` where samples do not differ.
    - `rows`: for each table, which row an op reads: `(levels, width)`; any row for padding.
    - `common`: a PyTree of arrays, such as `(1, samples)`.
    - `noise`: `(noise_arguments, counter) -> z`: the noise of ops, by counters of their levels and
        lanes, `(lanes, 1)` or `(1, samples)`.
    - `noise_arguments`: a PyTree of arrays. Not differentiated.
    """

    tables: AbstractOpLaw | None
    rows: AbstractOpLaw
    common: Any
    noise: Callable[..., Any] = eqx.field(static=True)
    noise_arguments: Any

    def rows_of(self, level: Int[Array, ""]) -> AbstractOpLaw:
        """The row of each table that the lanes of a level read."""
        return jax.tree.map(lambda row: row[level], self.rows)


def propagate(
    lanes: Lanes, latencies: Latencies, num_samples: int, dtype: jnp.dtype
) -> Float[Array, "sinks samples"]:
    """The ends of a graph's sinks, in seconds: the latest end of the ops of each.

    Latencies are made where they are used, one level after the other.

    Differentiable in reverse mode with respect to `latencies.tables` and `latencies.common`. The
    derivative of a max-plus program is one along the critical path and zero elsewhere: one pass
    keeps which of the ends that an op waits for was the latest (a bit where there are two), another
    follows these back, one level after the other, and makes the latencies on the path again. Where
    ends are equal, the path goes through the first.

    **Arguments:**

    - `lanes`: the graph.
    - `latencies`: see [`Latencies`][].
    - `num_samples`: the length of the samples' axis.
    - `dtype`: of the ends.
    """
    return _ends(*_parted(latencies), lanes, num_samples, dtype)


def propagate_to(
    lanes: Lanes, latencies: Latencies, sink: Int[Array, " samples"], dtype: jnp.dtype
) -> Float[Array, " samples"]:
    """The end of one sink in each sample, in seconds: `propagate`, where the derivatives of several
    figures, by `jax.vmap`, go back along the same paths, which are followed once.
    """
    return _end(*_parted(latencies), lanes, sink, dtype)


def _parted(latencies: Latencies):
    """What is differentiated, and the rest."""
    values, rest = eqx.partition((latencies.tables, latencies.common), eqx.is_inexact_array)
    return values, rest, dataclasses.replace(latencies, tables=None, common=None)


@eqx.filter_custom_vjp
def _end(values, rest, latencies, lanes, sink, dtype):
    ends, _ = _forward(values, rest, latencies, lanes, len(sink), dtype, keep=False)
    return ends[sink, jnp.arange(len(sink))]


@_end.def_fwd
def _end_forward(perturbed, values, rest, latencies, lanes, sink, dtype):
    del perturbed
    number = len(sink)
    ends, kept = _forward(values, rest, latencies, lanes, number, dtype, keep=True)
    return ends[sink, jnp.arange(number)], kept


@_end.def_bwd
def _end_backward(kept, cotangent, perturbed, values, rest, latencies, lanes, sink, dtype):
    del perturbed, dtype
    return _along_path(values, rest, latencies, lanes, kept, sink, cotangent)


@eqx.filter_custom_vjp
def _ends(values, rest, latencies, lanes, num_samples, dtype):
    return _forward(values, rest, latencies, lanes, num_samples, dtype, keep=False)[0]


@_ends.def_fwd
def _ends_forward(perturbed, values, rest, latencies, lanes, num_samples, dtype):
    del perturbed
    return _forward(values, rest, latencies, lanes, num_samples, dtype, keep=True)


def level_latencies(latencies: Latencies, tables, common, lanes: Lanes, level):
    """The latencies of the lanes of a level: `(width, samples)`, or what broadcasts to it."""
    mine = jax.tree.map(lambda table, row: table[row], tables, latencies.rows_of(level))
    column = jnp.arange(lanes.width, dtype=jnp.uint32)[:, None]
    counter = level.astype(jnp.uint32) * lanes.counters + column
    z = latencies.noise(latencies.noise_arguments, counter)
    return mine.latency(lanes.ops[level][:, None], z, common)


def _forward(values, rest, latencies: Latencies, lanes: Lanes, num_samples, dtype, *, keep):
    """The ends of the sinks, and, to `keep`, which end was the latest at each join and sink."""
    tables, common = eqx.combine(values, rest)

    def step(level, carry):
        state, choices = carry
        latest, choice = _latest(state, lanes.reads[level], keep)
        drawn = level_latencies(latencies, tables, common, lanes, level)
        if keep:
            choices = lax.dynamic_update_index_in_dim(choices, pack(choice, lanes), level, 0)
        return state.at[lanes.writes[level]].set(latest + drawn, mode=_IN), choices

    def block(turn, carry):
        state, choices, passed = carry
        first = turn * _LEVELS_OF_SUM
        last = jnp.minimum(first + _LEVELS_OF_SUM, lanes.num_levels)
        state, choices = lax.fori_loop(first, last, step, (state, choices))
        # Max-plus is linear: what is taken from all slots, the start's too, is added at the end.
        # Any shift would do, also that of a slot that is no longer read.
        latest = jnp.where(last < lanes.num_levels, jnp.max(state, axis=0, keepdims=True), 0)
        return state - latest, choices, passed + latest

    state = jnp.zeros((lanes.num_slots, num_samples), dtype)
    words, word = words_of(lanes)
    choices = jnp.zeros((len(lanes.ops), words, num_samples), word) if keep else None
    blocks = -(-lanes.num_levels // _LEVELS_OF_SUM)
    start = (state, choices, jnp.zeros((1, num_samples), dtype))
    state, choices, passed = lax.fori_loop(0, blocks, block, start)
    ends, choice = _latest(state, lanes.sinks, keep)
    return ends + passed, (choices, choice)


def _latest(state, reads: Int[Array, "lanes fan_in"], keep: bool):
    """The latest of the ends that each lane waits for, and which one it is: the first of equals."""
    latest = state.at[reads[:, 0]].get(mode=_IN)
    choice: Any = jnp.zeros(latest.shape, jnp.uint32) if keep else None
    for k in range(1, reads.shape[1]):
        end = state.at[reads[:, k]].get(mode=_IN)
        if keep:
            choice = jnp.where(end > latest, jnp.uint32(k), choice)
        latest = jnp.maximum(latest, end)
    return latest, choice


@_ends.def_bwd
def _ends_backward(kept, cotangent, perturbed, values, rest, latencies, lanes, num_samples, dtype):
    del perturbed, dtype

    def follow(carry):
        """The path of one sink of each sample, and one sink less to follow."""
        cotangent, gradient = carry
        sink, columns = jnp.argmax(cotangent != 0, axis=0), jnp.arange(num_samples)
        weight = cotangent[sink, columns]
        more = _along_path(values, rest, latencies, lanes, kept, sink, weight)
        return cotangent.at[sink, columns].set(0), jax.tree.map(jnp.add, gradient, more)

    start = cotangent, jax.tree.map(jnp.zeros_like, values)
    return lax.while_loop(lambda carry: jnp.any(carry[0] != 0), follow, start)[1]


def _along_path(values, rest, latencies, lanes: Lanes, kept, sink, weight):
    """What the latencies on the path to a sink of each sample contribute to the derivatives, from
    the sink on back to the start.

    That of one second of each sample's end is found first, and weighted then: weights of several
    figures share the path.
    """
    choices, at_sinks = kept
    cell = lanes.sink_cells[sink, at_sinks[sink, jnp.arange(len(sink))].astype(jnp.int32)]
    tables, common = values
    of_second = jax.tree.map(lambda x: jnp.zeros((len(x), len(sink)), x.dtype), tables)
    start = of_second, jax.tree.map(jnp.zeros_like, common)
    of_second, of_common = _per_second(values, rest, latencies, lanes, choices, cell, weight, start)

    def weighted(total, table):
        total = total * weight[None, :]
        return jnp.sum(total, axis=1, keepdims=True) if table.shape[1] == 1 else total

    return jax.tree.map(weighted, of_second, tables), of_common


def _per_second(values, rest, latencies, lanes: Lanes, choices, cell, weight, gradient):
    """Adds the derivatives of the ends with respect to tables, by sample, and of the weighted ends
    with respect to what is common: for every op on the path.
    """
    width = lanes.width
    samples = cell.shape[0]
    together = min(len(lanes.ops), _LEVELS_AT_ONCE)
    tables = values[0]

    # Three loops, with what passes from one to the next in memory: in a single one, XLA would draw
    # the same noise again for each of its uses.
    def block(turn, carry):
        cell, of_tables, of_common = carry
        first = (blocks - 1 - turn) * together
        count = jnp.minimum(lanes.num_levels - first, together)

        def walk(i, carry):
            cell, lane_of, z_of = carry
            slot = count - 1 - i
            level = first + slot
            lane = cell - level * np.int32(width)
            counter = level.astype(jnp.uint32) * lanes.counters + lane.astype(jnp.uint32)
            z = latencies.noise(latencies.noise_arguments, counter[None, :])[0]
            cell = followed(cell, lane, lanes.before[level], choices[level], lanes)
            return cell, lane_of.at[slot].set(lane), z_of.at[slot].set(z)

        def contribution(slot, carry):
            parts, of_common = carry
            at = (first + slot, lane_of[slot], z_of[slot])
            part, more = _contribution(values, rest, latencies, lanes, *at, weight)
            parts = jax.tree.map(lambda all, x: all.at[slot].set(x), parts, part)
            return parts, jax.tree.map(jnp.add, of_common, more)

        def add(slot, totals):
            rows = latencies.rows_of(first + slot)
            mine = lane_of[slot][None, :] == np.arange(width, dtype=np.int32)[:, None]

            def of_table(total, row, part):
                return total.at[row].add(jnp.where(mine, part[slot], 0))

            return jax.tree.map(of_table, totals, _where_there(rows, totals), parts)

        shape = (together, samples)
        held = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, weight.dtype))
        cell, lane_of, z_of = lax.fori_loop(0, count, walk, (cell, *held))
        shape = (together, 1, samples)
        parts = jax.tree.map(lambda table: jnp.zeros(shape, table.dtype), tables)
        parts, of_common = lax.fori_loop(0, count, contribution, (parts, of_common))
        return cell, lax.fori_loop(0, count, add, of_tables), of_common

    blocks = (lanes.num_levels + np.int32(together - 1)) // np.int32(together)
    return lax.fori_loop(0, blocks, block, (cell, *gradient))[1:]


def _where_there(rows: AbstractOpLaw, tables: AbstractOpLaw) -> AbstractOpLaw:
    """The rows of the tables that exist."""
    keep = jax.tree.map(lambda table: table is not None, tables, is_leaf=lambda x: x is None)
    return jax.tree.map(
        lambda kept, row: row if kept else None, keep, rows, is_leaf=lambda x: x is None
    )


def _contribution(values, rest, latencies: Latencies, lanes: Lanes, level, lane, z, weight):
    """What the latencies on the path at one level contribute to the derivatives: of the ends with
    respect to the row of each table that they read; of the weighted ends to what is common.
    """
    tables, common = eqx.combine(values, rest)

    def at_lane(x):
        """The value of the lane on the path; zero if no lane of the level is on it."""
        value = jnp.zeros((1, 1), x.dtype)
        for j in range(len(x)):
            value = jnp.where(lane[None, :] == j, x[j : j + 1], value)
        return value

    rows = latencies.rows_of(level)
    mine = jax.tree.map(lambda table, row: at_lane(table[row]), tables, rows)
    op = at_lane(lanes.ops[level][:, None])
    # XLA would look them up again for each use.
    mine, op = lax.optimization_barrier((mine, op))
    inexact, others = eqx.partition((mine, common), eqx.is_inexact_array)

    def latency(inexact):
        mine, common = eqx.combine(inexact, others)
        return mine.latency(op, z[None, :], common)

    _, vjp = jax.vjp(latency, inexact)
    there = ((lane >= 0) & (lane < lanes.width))[None, :]
    ((part, of_common),) = vjp(there.astype(z.dtype))
    if jax.tree.leaves(of_common):
        ((_, of_common),) = vjp(jnp.where(there, weight[None, :], 0))
    return part, of_common
