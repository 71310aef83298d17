"""The whole of a propagation as one kernel of a GPU, by Pallas and Triton.

A program of its grid takes some samples through all levels. A thread reads only the slots of its
own samples, so nothing waits for another thread: slots lie in memory that the L1 and L2 caches
hold, and between two levels there is no launch, no barrier and no host. Latencies are drawn where
they are used, by the same functions as elsewhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import triton

from ._lanes import bits_of, words_of
from ._latencies import Latencies
from ._levels import Levels
from ._propagate import LEVELS_OF_SUM


_SAMPLES, _WARPS = 512, 4  # Of a program of the grid: an H200 is fastest with these.
# Lanes whose code stands side by side. The others of a level follow in a loop: code for 16 lanes
# would compile for half a minute.
_LANES = 2


class _InPlace:
    """A table that is read where it lies: what `look_up` asks of an array."""

    def __init__(self, table):
        self.table = table

    def reshape(self, *_):
        return self

    def __getitem__(self, index):
        return triton.load(self.table.at[index])


def one_kernel(
    tables,
    common,
    latencies: Latencies,
    levels: Levels,
    num_samples: int,
    dtype,
    *,
    keep,
    interpret,
):
    """The ends of the sinks, and, to `keep`, which end was the latest at each join and sink: the
    same bits as the loops of XLA. In single precision.

    **Arguments:**

    - `tables`, `common`: what `latencies` is without.
    - `num_samples`: a multiple of a power of two that is worth a program of the grid.
    - `interpret`: whether JAX evaluates the kernel, on any device.
    """
    block = min(num_samples & -num_samples, _SAMPLES)
    (width, fan_in), (sinks, fan) = levels.reads.shape[1:], levels.sinks.shape
    bits, together = bits_of(levels)
    words, word = words_of(levels)
    lanes, num_slots = min(_LANES, together), np.int32(levels.num_slots)
    rows = levels.num_slots + (width if lanes < width else 0)

    def of_samples(x) -> bool:
        return x.shape[-1] == num_samples

    def part_of(x) -> pallas.BlockSpec:
        """What a program sees of an array: its own samples, or all."""
        if of_samples(x):
            return pallas.BlockSpec((*x.shape[:-1], block), lambda i: (*[0] * (x.ndim - 1), i))
        return pallas.BlockSpec(x.shape, lambda i: (0,) * x.ndim)

    # Arrays that a kernel takes have one axis at least; one that it reads in place has one.
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (levels.num_levels, levels.counters)])
    graph = numbers, levels.ops, levels.reads.reshape(-1, width * fan_in), levels.writes
    common = jax.tree.map(lambda x: x if of_samples(x) else x.reshape(-1), common)
    arrays = (*graph, levels.sinks), latencies.rows, tables, common, latencies.noise_arguments
    leaves, tree = jax.tree.flatten(arrays)

    def turns(number, body, start=None):
        return lax.fori_loop(np.int32(0), jnp.asarray(number, jnp.int32), body, start)

    def kernel(*refs):
        graph, row, table, common, noise_arguments = tree.unflatten(refs[: len(leaves)])
        numbers, ops, reads, writes, sink_slots = graph
        state, ends, *kept = refs[len(leaves) :]
        num_levels, counters = numbers[np.int32(0)], numbers[np.int32(1)].astype(jnp.uint32)
        noise_arguments = jax.tree.map(
            lambda x: x[...] if x.shape == (block,) else tuple(x[i] for i in range(len(x))),
            noise_arguments,
        )

        def latest(slots):
            """The latest of the ends in some slots, and which one it is: the first of equals."""
            end, choice = state[slots[0], :], jnp.zeros((block,), jnp.uint32)
            for k, slot in enumerate(slots[1:], 1):
                other = state[slot, :]
                choice = jnp.where(other > end, np.uint32(k), choice) if keep else choice
                end = jnp.maximum(end, other)
            return end, choice

        def latency(level, lane):
            def of_lane(table, row):
                at = row[level, lane]  # A negative one counts from the end.
                at = jnp.where(at < 0, at + np.int32(table.shape[0]), at)
                return table[at, :] if table.shape[1] > 1 else table[at, 0]

            counter = level.astype(jnp.uint32) * counters + lane.astype(jnp.uint32)
            z, op = latencies.noise(noise_arguments, counter), ops[level, lane]
            # Read where it is used: what is held through all levels would take many registers.
            shared = jax.tree.map(lambda x: x[0, :] if x.ndim == 2 else _InPlace(x), common)
            seconds = jax.tree.map(of_lane, table, row).latency(op, z, shared)
            return jnp.where(op >= 0, seconds, 0) if levels.joins else seconds

        def side_by_side(level, first, packed):
            """Some lanes of a level, from one on, whose choices are packed into a word."""
            places = [first + np.int32(i) for i in range(lanes)]
            lane_ends = []
            for lane in places:
                slots = [reads[level, lane * np.int32(fan_in) + np.int32(k)] for k in range(fan_in)]
                end, choice = latest(slots)
                lane_ends.append(end + latency(level, lane))
                shift = (lane % np.int32(together) * np.int32(bits)).astype(jnp.uint32)
                packed = packed | (choice << shift) if keep else packed
            # All lanes of a level read before any writes to a slot.
            for lane, end in zip(places, lane_ends, strict=True):
                state[writes[level, lane] if lanes == width else num_slots + lane, :] = end
            return packed

        def of_word(level, number):
            """The lanes of a level whose choices share a word."""
            first = number * np.int32(together)

            def next_lanes(i, packed):
                return side_by_side(level, first + i * np.int32(lanes), packed)

            packed = turns(together // lanes, next_lanes, jnp.zeros((block,), jnp.uint32))
            if keep:
                kept[0][level, number, :] = packed.astype(word)

        def of_level(level, _):
            turns(words, lambda number, _: of_word(level, number))
            if lanes < width:
                turns(width, lambda lane, _: write(level, lane))

        def write(level, lane):
            state[writes[level, lane], :] = state[num_slots + lane, :]

        def of_levels(turn, passed):
            """So many levels, after which ends are counted from the latest one."""
            first = turn * np.int32(LEVELS_OF_SUM)
            last = jnp.minimum(first + np.int32(LEVELS_OF_SUM), num_levels)
            lax.fori_loop(first, last, of_level, None)
            slots = jnp.minimum(num_levels - last, np.int32(1)) * num_slots
            least = jnp.full((block,), -jnp.inf, dtype)
            most = turns(slots, lambda slot, most: jnp.maximum(most, state[slot, :]), least)
            most = jnp.where(last < num_levels, most, 0)

            def less(slot, _):
                state[slot, :] = state[slot, :] - most

            turns(slots, less)
            return passed + most

        def clear(slot, _):
            state[slot, :] = jnp.zeros((block,), dtype)

        def of_sink(sink, passed):
            end, choice = latest([sink_slots[sink, np.int32(k)] for k in range(fan)])
            ends[sink, :] = end + passed
            if keep:
                kept[1][sink, :] = choice
            return passed

        turns(num_slots, clear)
        blocks = (num_levels + np.int32(LEVELS_OF_SUM - 1)) // np.int32(LEVELS_OF_SUM)
        turns(sinks, of_sink, turns(blocks, of_levels, jnp.zeros((block,), dtype)))

    shapes: list[Any] = [((rows,), dtype), ((sinks,), dtype)]
    shapes += [((len(levels.ops), words), word), ((sinks,), np.uint32)] if keep else []
    results = [jax.ShapeDtypeStruct((*shape, num_samples), kind) for shape, kind in shapes]
    _, ends, *kept = pallas.pallas_call(
        kernel,
        grid=(num_samples // block,),
        in_specs=[part_of(x) for x in leaves],
        out_specs=[part_of(x) for x in results],
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="propagate",
    )(*leaves)
    return ends, tuple(kept) if keep else (None, None)
