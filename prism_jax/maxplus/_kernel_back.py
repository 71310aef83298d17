"""The way back along the paths of all samples as one kernel of a GPU, by Pallas and Triton.

A thread follows the path of one sample, level by level, and adds what each op on it contributes to
a column of its own: it waits for no other, and sums are the same each time.
"""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton

from ._derivative import contributions, differentiated
from ._grid import common_of, noise_of, numbers_of, on_grid, turns
from ._lanes import bits_of
from ._latencies import Latencies
from ._levels import Levels


# Of a program of the grid: one to a thread. Of several to a thread, Triton would have those that
# are read in order in other threads than those that are read from here and there.
_SAMPLES = 128


def one_kernel_back(
    values, fixed, latencies: Latencies, levels: Levels, choices, last, weight, *, interpret
):
    """`along_path` to rounding: in single precision, for a multiple of 128 samples, where nothing
    that is common is a table of several rows.

    **Arguments:**

    - `interpret`: whether JAX evaluates the kernel, on any device.
    """
    tables, common = eqx.combine(values, fixed)
    wanted = differentiated(values)
    bits, together = bits_of(levels)
    width, fan_in = np.int32(levels.width), np.int32(levels.before.shape[2])

    def kernel(graph, law, of_samples, sums):
        numbers, ops, before = graph
        choices, last, weight = of_samples
        column, none = jnp.arange(_SAMPLES, dtype=jnp.int32), jnp.zeros(_SAMPLES, jnp.int32)

        def level_back(turn, cell):
            level = numbers[np.int32(0)] - np.int32(1) - turn
            lane = cell - level * width
            here = (lane >= 0) & (lane < width)

            def read(x, *place):
                return triton.load(x.at[place], mask=here, other=x.dtype.type(0))

            def row_of(table, row):
                at = read(row, level, lane)  # A negative one counts from the end.
                return jnp.where(at < 0, at + np.int32(len(table)), at)

            def of_lane(table, row):
                return read(table, row, column if table.shape[1] > 1 else none)

            rows = jax.tree.map(row_of, law.tables, law.rows)
            of_lanes, common = jax.tree.map(of_lane, law.tables, rows), common_of(law)
            op = read(ops, level, lane)
            of_pair = ft.partial(jnp.where, (lane & np.int32(1)) == 0)
            z = noise_of(law, numbers, level, lane, _SAMPLES, of_pair)
            parts = contributions(wanted, of_lanes, common, op, z, weight[...])
            rows = eqx.filter((rows, jax.tree.map(lambda _: none, common)), wanted)
            adds = here & (op >= 0) if levels.joins else here
            for total, row, part in zip(sums, *map(jax.tree.leaves, (rows, parts)), strict=True):
                place = total.at[row, column]
                part += triton.load(place, mask=adds, other=total.dtype.type(0))
                triton.store(place, part, mask=adds)
            word = read(choices, level, lax.div(lane, np.int32(together)), column)
            first = lax.rem(lane, np.int32(together)) * np.int32(bits)
            chosen = word.astype(jnp.uint32) >> first.astype(jnp.uint32)
            chosen = (chosen & np.uint32(2**bits - 1)).astype(jnp.int32)
            return jnp.where(here, read(before, level, lane * fan_in + chosen), cell)

        for total in sums:

            def clear(row, _, total=total):
                total[row, :] = jnp.zeros(_SAMPLES, total.dtype)

            turns(len(total), clear)
        turns(numbers[np.int32(0)], level_back, last[...])

    leaves, tree = jax.tree.flatten(values)
    sums = on_grid(
        kernel,
        (numbers_of(levels), levels.ops, levels.before.reshape(len(levels.before), -1)),
        dataclasses.replace(latencies, tables=tables, common=common),
        (choices, last, weight),
        [((len(x),), x.dtype) for x in leaves],
        samples=len(last),
        block=_SAMPLES,
        name="along_path",
        interpret=interpret,
    )

    def whole(total, table):
        return jnp.sum(total, axis=1, keepdims=True) if table.shape[1] == 1 else total

    return jax.tree.map(whole, tree.unflatten(sums), values)
