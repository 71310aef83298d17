"""Which of the ends that an op waits for was the latest, in as few bits as hold it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ._lanes import Lanes


def _bits(lanes: Lanes) -> tuple[int, int]:
    """Bits that a choice takes, and lanes that share a word of at most 32."""
    bits = (lanes.reads.shape[2] - 1).bit_length()
    return bits, min(32 // bits, lanes.width)


def words_of(lanes: Lanes) -> tuple[int, Any]:
    """How many words hold the choices of a level, and their type."""
    bits, together = _bits(lanes)
    types = (jnp.uint8, jnp.uint16, jnp.uint32)
    word = next(d for d in types if jnp.iinfo(d).bits >= bits * together)
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
