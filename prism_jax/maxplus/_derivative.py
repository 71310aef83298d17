"""Derivatives of the ends of a graph: back along the critical path of each sample."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._lanes import followed
from ._latencies import AbstractOpLaw, Latencies
from ._levels import Levels


# Levels that the derivative goes back through at once; what it holds of each is kept in a cache.
_LEVELS_AT_ONCE = 16


def along_path(values, fixed, latencies, levels: Levels, kept, sink, weight):
    """What the latencies on the path to a sink of each sample contribute to the derivatives, from
    the sink on back to the start.

    That of one second of each sample's end is found first, and weighted then: weights of several
    figures share the path.

    **Arguments:**

    - `values`, `fixed`: tables and what is common, as far as they are differentiated or fixed;
        `latencies` is without them.
    - `kept`: which end was the latest at each join, by level, and at each sink.
    - `sink`, `weight`: `(samples,)`, the sink, and the derivative with respect to its end.

    **Returns:**

    The derivatives with respect to `values`.
    """
    choices, at_sinks = kept
    cell = levels.sink_cells[sink, at_sinks[sink, jnp.arange(len(sink))].astype(jnp.int32)]
    of_second, of_common = _per_second(values, fixed, latencies, levels, choices, cell, weight)

    def weighted(total, table):
        total = total * weight[None, :]
        return jnp.sum(total, axis=1, keepdims=True) if table.shape[1] == 1 else total

    return jax.tree.map(weighted, of_second, values[0]), of_common


def _per_second(values, fixed, latencies, levels: Levels, choices, cell, weight):
    """The derivatives of the ends with respect to tables, by sample, and of the weighted ends with
    respect to what is common: the sums over every op on the path.
    """
    width = levels.width
    samples = cell.shape[0]
    together = min(len(levels.ops), _LEVELS_AT_ONCE)
    tables, common = values

    # Three loops, with what passes from one to the next in memory: in a single one, XLA would draw
    # the same noise again for each of its uses.
    def block(turn, carry):
        cell, of_tables, of_common = carry
        first = (blocks - 1 - turn) * together
        count = jnp.minimum(levels.num_levels - first, together)

        def walk(i, carry):
            cell, lane_of, z_of = carry
            slot = count - 1 - i
            level = first + slot
            lane = cell - level * np.int32(width)
            counter = level.astype(jnp.uint32) * levels.counters + lane.astype(jnp.uint32)
            z = latencies.noise(latencies.noise_arguments, counter[None, :])[0]
            cell = followed(cell, lane, levels.before[level], choices[level], levels)
            return cell, lane_of.at[slot].set(lane), z_of.at[slot].set(z)

        def contribution(slot, carry):
            parts, of_common = carry
            at = (first + slot, lane_of[slot], z_of[slot])
            part, more = _contribution(values, fixed, latencies, levels, *at, weight)
            parts = jax.tree.map(lambda all, x: all.at[slot].set(x), parts, part)
            return parts, jax.tree.map(jnp.add, of_common, more)

        def add(slot, totals):
            rows = latencies.rows_of(first + slot)
            on_path = lane_of[slot][None, :] == np.arange(width, dtype=np.int32)[:, None]

            def of_table(total, row, part):
                return total.at[row].add(jnp.where(on_path, part[slot], 0))

            return jax.tree.map(of_table, totals, _where_there(rows, totals), parts)

        shape = (together, samples)
        held = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, weight.dtype))
        cell, lane_of, z_of = lax.fori_loop(0, count, walk, (cell, *held))
        shape = (together, 1, samples)
        parts = jax.tree.map(lambda table: jnp.zeros(shape, table.dtype), tables)
        parts, of_common = lax.fori_loop(0, count, contribution, (parts, of_common))
        return cell, lax.fori_loop(0, count, add, of_tables), of_common

    blocks = (levels.num_levels + np.int32(together - 1)) // np.int32(together)
    by_sample = jax.tree.map(lambda x: jnp.zeros((len(x), samples), x.dtype), tables)
    start = cell, by_sample, jax.tree.map(jnp.zeros_like, common)
    return lax.fori_loop(0, blocks, block, start)[1:]


def _where_there(rows: AbstractOpLaw, tables: AbstractOpLaw) -> AbstractOpLaw:
    """The rows of the tables that exist."""
    keep = jax.tree.map(lambda table: table is not None, tables, is_leaf=lambda x: x is None)
    return jax.tree.map(
        lambda kept, row: row if kept else None, keep, rows, is_leaf=lambda x: x is None
    )


def _contribution(values, fixed, latencies: Latencies, levels: Levels, level, lane, z, weight):
    """What the latencies on the path at one level contribute to the derivatives: of the ends with
    respect to the row of each table that they read; of the weighted ends to what is common.
    """
    tables, common = eqx.combine(values, fixed)

    def at_lane(x):
        """The value of the lane on the path; zero if no lane of the level is on it."""
        value = jnp.zeros((1, 1), x.dtype)
        for j in range(len(x)):
            value = jnp.where(lane[None, :] == j, x[j : j + 1], value)
        return value

    rows = latencies.rows_of(level)
    of_lane = jax.tree.map(lambda table, row: at_lane(table[row]), tables, rows)
    op = at_lane(levels.ops[level][:, None])
    # XLA would look them up again for each use.
    of_lane, op = lax.optimization_barrier((of_lane, op))
    inexact, static = eqx.partition((of_lane, common), eqx.is_inexact_array)

    def latency(inexact):
        of_lane, common = eqx.combine(inexact, static)
        return of_lane.latency(op, z[None, :], common)

    _, vjp = jax.vjp(latency, inexact)
    there = ((lane >= 0) & (lane < levels.width))[None, :]
    there = there & (op >= 0) if levels.joins else there
    ((part, of_common),) = vjp(there.astype(z.dtype))
    if jax.tree.leaves(of_common):
        ((_, of_common),) = vjp(jnp.where(there, weight[None, :], 0))
    return part, of_common
