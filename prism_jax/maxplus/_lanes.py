"""The index arrays of a graph, padded to shapes that many graphs share; and which of the ends that
an op waits for was the latest, in as few bits as hold it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped, UInt32

from ._levels import START, WASTE, Levels


class Lanes(eqx.Module):
    """A graph as `propagate` takes it: arguments of what is compiled, so that graphs of one bucket
    of shapes share compiled code.

    The cell of an op is its level times the width, plus its lane. Padding lanes have the op -1,
    read `START` and write to `WASTE`; levels from `num_levels` on are padding that no loop visits.

    **Attributes:**

    - `ops`: `(levels, width)`, the op of each lane; of joins -1, too.
    - `reads`: `(levels, width, fan_in)`, the slots of the ends that an op waits for.
    - `writes`: `(levels, width)`, the slot that takes its end.
    - `before`: `(levels, width, fan_in)`, the cells of the ops behind `reads`, or -1.
    - `sinks`: `(sinks, fan)`, slots whose maximum at the end is a sink's end.
    - `sink_cells`: `(sinks, fan)`, the cells of the ops behind them, or -1.
    - `num_levels`: how many levels there are.
    - `counters`: how many random numbers a level has: the graph's own width.
    - `num_slots`: static.
    - `joins`: whether there are joins. Static, so that graphs without any do not compute that these
        take no time.
    """

    ops: Int[Array, "levels width"]
    reads: Int[Array, "levels width fan_in"]
    writes: Int[Array, "levels width"]
    before: Int[Array, "levels width fan_in"]
    sinks: Int[Array, "sinks fan"]
    sink_cells: Int[Array, "sinks fan"]
    num_levels: Int[Array, ""]
    counters: UInt32[Array, ""]
    num_slots: int = eqx.field(static=True)
    joins: bool = eqx.field(static=True)

    @property
    def width(self) -> int:
        return self.ops.shape[1]


def bucket(number: int, least: int, step: int = 2) -> int:
    """The least of the sizes `least`, `least * step`, `least * step**2` ... that is enough."""
    size = least
    while size < number:
        size *= step
    return size


def to_lanes(levels: Levels, num_sinks: int) -> Lanes:
    """Pads a graph to its bucket of shapes, with room for so many sinks."""
    number, width = levels.ops.value.shape
    sinks = levels.sinks.value
    shape = (
        bucket(number, 1024, 4),
        bucket(width, 2),
        bucket(levels.reads.value.shape[2], 2),
    )
    of_sinks = (num_sinks, bucket(sinks.shape[1], 1))
    cell = cells(levels, shape[1])
    return Lanes(
        ops=padded(
            np.where(levels.ops.value < levels.num_ops, levels.ops.value, -1), shape[:2], -1
        ),
        reads=padded(levels.reads.value, shape, START),
        writes=padded(levels.writes.value, shape[:2], WASTE),
        before=padded(cell[levels.predecessors.value], shape, -1),
        sinks=padded(sinks, of_sinks, START),
        sink_cells=padded(cell[levels.sink_ops.value], of_sinks, -1),
        num_levels=jax.device_put(np.int32(number)),
        counters=jax.device_put(np.uint32(width)),
        num_slots=bucket(levels.num_slots, 64),
        joins=levels.num_joins > 0,
    )


def cells(levels: Levels, width: int) -> Int[np.ndarray, " ops_joins_and_none"]:
    """The cell of each op, then of each join, and at last -1 for "no op"."""
    lanes = levels.ops.value
    level, lane = np.nonzero(lanes >= 0)
    cell = np.full(levels.num_ops + levels.num_joins + 1, -1, np.int32)
    cell[lanes[level, lane]] = level * width + lane
    return cell


def in_lanes(
    levels: Levels, of_ops: Shaped[np.ndarray, " ops"], shape: tuple[int, int]
) -> Shaped[Array, "levels width"]:
    """A number for each op, where its lane is."""
    lanes = levels.ops.value
    values = np.append(of_ops, np.zeros(levels.num_joins + 1, of_ops.dtype))
    return padded(values[lanes].astype(np.int32), shape)


def padded(
    array: np.ndarray,
    shape: int | tuple[int, ...],
    fill: int | np.integer = 0,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    """An array on the device, with room at the end of each axis; whole numbers have 32 bits unless
    there is a `dtype`.
    """
    own_dtype = np.int32 if array.dtype == np.int64 else array.dtype
    filled = np.full(shape, fill, own_dtype if dtype is None else dtype)
    filled[tuple(map(slice, array.shape))] = array
    return jax.device_put(filled)  # `jnp.asarray` would compile a copy for each shape.


def _bits(lanes: Lanes) -> tuple[int, int]:
    """Bits that a choice takes, and lanes that share a word of at most 32."""
    bits = (lanes.reads.shape[2] - 1).bit_length()
    return bits, min(32 // bits, lanes.width)


def words_of(lanes: Lanes) -> tuple[int, Any]:
    """How many words hold the choices of a level, and their type."""
    bits, together = _bits(lanes)
    word = np.dtype(f"uint{bucket(bits * together, 8)}")
    return -(-lanes.width // together), word


def pack(choice, lanes: Lanes):
    """Choices of the lanes, packed into words: `(words, samples)`."""
    bits, together = _bits(lanes)
    shifts = np.arange(together, dtype=np.uint32) * np.uint32(bits)
    words = [
        jnp.sum(part << shifts[: len(part), None], axis=0, dtype=jnp.uint32)
        for part in (choice[i : i + together] for i in range(0, len(choice), together))
    ]
    return jnp.stack(words).astype(words_of(lanes)[1])


def followed(cell, lane, before, choice, lanes: Lanes):
    """Where a path goes on from this level: unchanged if it does not pass here."""
    bits, together = _bits(lanes)
    for j in range(before.shape[0]):
        word = choice[j // together].astype(jnp.uint32)
        chosen = (word >> np.uint32(j % together * bits)) & np.uint32(2**bits - 1)
        onward = before[j, 0]
        for k in range(1, before.shape[1]):
            onward = jnp.where(chosen == k, before[j, k], onward)
        cell = jnp.where(lane == j, onward, cell)
    return cell
