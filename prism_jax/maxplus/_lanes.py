"""Where the ops of a graph are among its lanes; and which of the ends that an op waits for was the
latest, in as few bits as hold it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from .._padding import bucket
from ._levels import Levels


def cells(levels: Levels) -> Int[np.ndarray, " ops_joins_and_none"]:
    """The cell of each op, then of each join, and at last -1 for "no op"."""
    nodes = levels.nodes
    there, cell = nodes >= 0, np.full(levels.num_ops + levels.num_joins + 1, -1, np.int32)
    cell[nodes[there]] = np.flatnonzero(there)
    return cell


def in_lanes(levels: Levels, of_ops: Any) -> Shaped[np.ndarray, " cells"]:
    """A number for each op, in its cell; zero in other cells."""
    return np.append(of_ops, np.zeros(levels.num_joins + 1, of_ops.dtype))[levels.nodes].ravel()


def bits_of(levels: Levels) -> tuple[int, int]:
    """Bits that a choice takes, and lanes that share a word of at most 32."""
    bits = (levels.reads.shape[2] - 1).bit_length()
    return bits, min(32 // bits, levels.width)


def words_of(levels: Levels) -> tuple[int, Any]:
    """How many words hold the choices of a level, and their type."""
    bits, together = bits_of(levels)
    # Of two bytes at least: in arrays of up to 4 GiB a kernel of a GPU counts elements by signed
    # numbers of 32 bits.
    word = np.dtype(f"uint{bucket(bits * together, 16)}")
    return -(-levels.width // together), word


def pack(choice, levels: Levels):
    """Choices of the lanes, packed into words: `(words, samples)`."""
    bits, together = bits_of(levels)
    shifts = np.arange(together, dtype=np.uint32) * np.uint32(bits)
    words = [
        jnp.sum(part << shifts[: len(part), None], axis=0, dtype=jnp.uint32)
        for part in (choice[i : i + together] for i in range(0, len(choice), together))
    ]
    return jnp.stack(words).astype(words_of(levels)[1])


def followed(cell, lane, before, choice, levels: Levels):
    """Where a path goes on from this level: unchanged if it does not pass here."""
    bits, together = bits_of(levels)
    for j in range(before.shape[0]):
        word = choice[j // together].astype(jnp.uint32)
        chosen = (word >> np.uint32(j % together * bits)) & np.uint32(2**bits - 1)
        onward = before[j, 0]
        for k in range(1, before.shape[1]):
            onward = jnp.where(chosen == k, before[j, k], onward)
        cell = jnp.where(lane == j, onward, cell)
    return cell
