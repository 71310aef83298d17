"""Derivatives of the ends of a graph: back along the critical path of each sample."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._lanes import followed
from ._latencies import AbstractOpLaw, Latencies
from ._levels import Levels


# Levels that the derivative goes back through at once; what it holds of each is kept in a cache.
_LEVELS_AT_ONCE = 8
# Of a table that does not differ between samples, so many sums are held, each of every so many-th
# sample: vectors add them, and a cache holds them.
_SUMS = 512


def along_path(values, fixed, latencies, levels: Levels, choices, last, weight):
    """What the latencies on the path of each sample contribute to the derivatives, from its last
    cell on back to the start.

    **Arguments:**

    - `values`, `fixed`: tables and what is common, as far as they are differentiated or fixed;
        `latencies` is without them.
    - `choices`: which end was the latest at each join, by level.
    - `last`, `weight`: `(samples,)`, the cell whose end is that of the path, and the derivative
        with respect to it.

    **Returns:**

    The derivatives with respect to `values`.
    """
    width, samples = np.int32(levels.width), len(last)
    together = min(len(levels.ops), _LEVELS_AT_ONCE)
    tables, common = values

    # What passes from one part to the next lies in memory: in a single loop, XLA would draw the
    # same noise again for each of its uses.
    def block(turn, carry):
        cell, of_tables, of_common = carry
        first = (blocks - 1 - turn) * np.int32(together)

        # No path comes through levels that are not there.
        def walk(i, carry):
            cell, cells = carry
            slot = together - 1 - i
            level = first + slot
            lane = cell - level * width
            onward = followed(cell, lane, levels.before[level], choices[level], levels)
            return onward, cells.at[slot].set(cell, mode="promise_in_bounds")

        def add(slot, totals):
            rows = latencies.rows_of(first + slot)
            on_path = lanes[slot][None] == np.arange(width, dtype=np.int32)[:, None]

            def of_lanes(total, part):
                return jnp.where(on_path, part[slot], 0).reshape(width, -1, total.shape[1])

            return _added(totals, _where_there(rows, totals), jax.tree.map(of_lanes, totals, parts))

        start = cell, jnp.zeros((together, samples), jnp.int32)
        cell, cells = lax.fori_loop(0, together, walk, start)
        level = first + jnp.arange(together, dtype=jnp.int32)
        lanes = cells - level[:, None] * width
        pair = level.astype(jnp.uint32)[:, None] * levels.pairs + lanes.astype(jnp.uint32) // 2
        of_pair = ft.partial(jnp.where, lanes % 2 == 0)
        z = latencies.noise(latencies.noise_arguments, pair, of_pair)
        parts, more = _contributions(values, fixed, latencies, levels, level, lanes, z, weight)
        of_tables = lax.fori_loop(0, together, add, of_tables)
        return cell, of_tables, jax.tree.map(jnp.add, of_common, more)

    def no_sums(table):
        sums = _SUMS if table.shape[1] == 1 and samples % _SUMS == 0 else samples
        return jnp.zeros((len(table), sums), table.dtype)

    blocks = (levels.num_levels + np.int32(together - 1)) // np.int32(together)
    start = last, jax.tree.map(no_sums, tables), jax.tree.map(jnp.zeros_like, common)
    _, of_tables, of_common = lax.fori_loop(0, blocks, block, start)

    def whole(total, table):
        return jnp.sum(total, axis=1, keepdims=True) if table.shape[1] == 1 else total

    return jax.tree.map(whole, of_tables, tables), of_common


def _added(totals, rows, of_lanes):
    """Totals with what the lanes of a level add to their rows: `(lanes, parts, sums)`."""
    several, single = eqx.partition(of_lanes, lambda x: x.shape[1] > 1)
    parts, tree = jax.tree.flatten(several)
    sums = [x.dtype.type(0) for x in parts]
    if parts:
        # All at once, which XLA on a CPU does while it makes the parts; of one alone it would first
        # put them into memory.
        sums = lax.reduce(parts, sums, lambda a, b: [*map(lax.add, a, b)], (1,))
    single = jax.tree.map(lambda x: x[:, 0], single)

    def with_lanes(total, row, x):
        return total.at[row].add(x, mode="promise_in_bounds")

    return jax.tree.map(with_lanes, totals, rows, eqx.combine(tree.unflatten(sums), single))


def _where_there(rows: AbstractOpLaw, tables: AbstractOpLaw) -> AbstractOpLaw:
    """The rows of the tables that exist."""
    keep = jax.tree.map(lambda table: table is not None, tables, is_leaf=lambda x: x is None)
    return jax.tree.map(
        lambda kept, row: row if kept else None, keep, rows, is_leaf=lambda x: x is None
    )


def _contributions(values, fixed, latencies: Latencies, levels: Levels, level, lanes, z, weight):
    """What the latencies on the path at some levels contribute to the derivatives of the weighted
    ends: with respect to the row of each table that they read, and to what is common.
    """
    tables, common = eqx.combine(values, fixed)

    def at_lanes(x):
        """The values of the lanes on the path; zero if no lane of a level is on it."""
        value = jnp.zeros((1, 1), x.dtype)
        for j in range(x.shape[1]):
            value = jnp.where(lanes == j, x[:, j], value)
        return value

    rows = latencies.rows_of(level)
    of_lanes = jax.tree.map(lambda table, row: at_lanes(table[row]), tables, rows)
    op = at_lanes(levels.ops[level][:, :, None])
    # XLA would look them up again for each use.
    of_lanes, op = lax.optimization_barrier((of_lanes, op))
    there = (lanes >= 0) & (lanes < levels.width)
    there = there & (op >= 0) if levels.joins else there
    weight = jnp.where(there, weight[None], 0)
    return contributions(differentiated(values), of_lanes, common, op, z, weight)


def differentiated(values):
    """Which arrays are differentiated: those that there are."""
    return jax.tree.map(lambda x: x is not None, values, is_leaf=lambda x: x is None)


def contributions(wanted, of_lanes: AbstractOpLaw, common, op, z, weight):
    """What latencies contribute to the derivatives of weighted ends with respect to what is wanted
    of their laws and of what is common.
    """
    inexact, static = eqx.partition((of_lanes, common), wanted)

    def latency(inexact):
        of_lanes, common = eqx.combine(inexact, static)
        return of_lanes.latency(op, z, common)

    return jax.vjp(latency, inexact)[1](weight)[0]
