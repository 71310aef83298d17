"""The whole of a propagation as one kernel of a GPU, by Pallas and Triton.

A program of its grid takes some samples through all levels. A thread reads only the slots of its
own samples, so nothing waits for another thread: slots lie in memory that the L1 and L2 caches
hold, and between two levels there is no launch, no barrier and no host. Latencies are drawn where
they are used, by the same functions as elsewhere.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._grid import common_of, noise_of, numbers_of, on_grid, turns
from ._lanes import bits_of, words_of
from ._latencies import Latencies
from ._levels import Levels
from ._propagate import LEVELS_OF_SUM


_SAMPLES = 512  # Of a program of the grid: an H200 is fastest with so many.


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
    num_levels, width, _ = levels.reads.shape
    words, word = words_of(levels)
    reads, sinks = levels.reads.reshape(num_levels, -1), (len(levels.sinks),)
    results: list[Any] = [((levels.num_slots + width,), dtype), (sinks, dtype)]
    results += [((num_levels, words), word), (sinks, np.uint32)] if keep else []

    def kernel(graph, law, _, written):
        _Block(block, levels, keep, graph, law, *written).propagate()

    _, ends, *kept = on_grid(
        kernel,
        (numbers_of(levels), levels.ops, reads, levels.writes, levels.sinks),
        dataclasses.replace(latencies, tables=tables, common=common),
        (),
        results,
        samples=num_samples,
        block=block,
        name="propagate",
        interpret=interpret,
    )
    return ends, tuple(kept) if keep else (None, None)


@dataclasses.dataclass(frozen=True)
class _Block:
    """The samples of a program of the grid, and the memory that it reads and writes.

    **Attributes:**

    - `size`: how many samples.
    - `levels`: of which only shapes are read.
    - `keep`: whether choices are kept.
    - `graph`: the number of levels and that of pairs of a level; ops, reads, writes and sinks.
    - `law`: the latencies.
    - `state`: the slots, and behind them a place for the end of each lane of a level.
    - `ends`, `choices`, `choices_of_sinks`: the results.
    """

    size: int
    levels: Levels
    keep: bool
    graph: tuple[Any, ...]
    law: Latencies
    state: Any
    ends: Any
    choices: Any = None
    choices_of_sinks: Any = None

    def propagate(self) -> None:
        numbers, *_, sinks = self.graph
        num_levels, num_slots = numbers[np.int32(0)], self.levels.num_slots
        zeros = jnp.zeros((self.size,), self.state.dtype)

        def clear(slot, _):
            self.state[slot, :] = zeros

        def block(turn, passed):
            return passed + self._levels_of_sum(turn, num_levels)

        def end_of(sink, passed):
            slots = [sinks[sink, np.int32(k)] for k in range(sinks.shape[1])]
            end, choice = self._latest(slots)
            self.ends[sink, :] = end + passed
            if self.keep:
                self.choices_of_sinks[sink, :] = choice
            return passed

        turns(num_slots, clear)
        blocks = (num_levels + np.int32(LEVELS_OF_SUM - 1)) // np.int32(LEVELS_OF_SUM)
        turns(len(self.levels.sinks), end_of, turns(blocks, block, zeros))

    def _levels_of_sum(self, turn, num_levels):
        """So many levels, and what is then subtracted from all slots: nothing after the last."""
        state, first = self.state, turn * np.int32(LEVELS_OF_SUM)
        last = jnp.minimum(first + np.int32(LEVELS_OF_SUM), num_levels)
        lax.fori_loop(first, last, lambda level, _: self._level(level), None)
        slots = jnp.minimum(num_levels - last, np.int32(1)) * np.int32(self.levels.num_slots)
        least = jnp.full((self.size,), -jnp.inf, state.dtype)
        latest = turns(slots, lambda slot, latest: jnp.maximum(latest, state[slot, :]), least)
        latest = jnp.where(last < num_levels, latest, 0)

        def subtract(slot, _):
            state[slot, :] = state[slot, :] - latest

        turns(slots, subtract)
        return latest

    def _level(self, level) -> None:
        """All lanes of a level read before any writes to a slot."""
        _, together = bits_of(self.levels)
        words, word = words_of(self.levels)

        # The code of two lanes, which share a pair of words, stands side by side: that of more
        # takes long to compile, and more registers than there are.
        def of_word(number, _):
            def of_pair(i, packed):
                lane = number * np.int32(together) + i * np.int32(2)
                both = noise_of(self.law, self.graph[0], level, lane, self.size, _both)
                for k, z in enumerate(both):
                    packed = packed | self._lane(level, lane + np.int32(k), z)
                return packed

            packed = turns(together // 2, of_pair, jnp.zeros((self.size,), jnp.uint32))
            if self.keep:
                self.choices[level, number, :] = packed.astype(word)

        def write(lane, _):
            slot = self.graph[3][level, lane]
            self.state[slot, :] = self.state[np.int32(self.levels.num_slots) + lane, :]

        turns(words, of_word)
        turns(self.levels.width, write)

    def _lane(self, level, lane, z):
        """Puts the end of a lane behind the slots, and gives its choice where its word has it."""
        reads, fan_in = self.graph[2], self.levels.reads.shape[2]
        slots = [reads[level, lane * np.int32(fan_in) + np.int32(k)] for k in range(fan_in)]
        end, choice = self._latest(slots)
        self.state[np.int32(self.levels.num_slots) + lane, :] = end + self._latency(level, lane, z)
        bits, together = bits_of(self.levels)
        return choice << (lane % np.int32(together) * np.int32(bits)).astype(jnp.uint32)

    def _latest(self, slots):
        """The latest of the ends in some slots, and which one it is: the first of equals."""
        end, choice = self.state[slots[0], :], jnp.zeros((self.size,), jnp.uint32)
        for k, slot in enumerate(slots[1:], 1):
            other = self.state[slot, :]
            choice = jnp.where(other > end, np.uint32(k), choice) if self.keep else choice
            end = jnp.maximum(end, other)
        return end, choice

    def _latency(self, level, lane, z):
        def of_lane(table, row):
            at = row[level, lane]  # A negative one counts from the end.
            at = jnp.where(at < 0, at + np.int32(table.shape[0]), at)
            return table[at, :] if table.shape[1] > 1 else table[at, 0]

        op = self.graph[1][level, lane]
        of_lanes = jax.tree.map(of_lane, self.law.tables, self.law.rows)
        seconds = of_lanes.latency(op, z, common_of(self.law))
        return jnp.where(op >= 0, seconds, 0) if self.levels.joins else seconds


def _both(first, second):
    return first, second
