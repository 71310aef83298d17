"""Counter-based random numbers: those of a sample depend only on its id and the key.

Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11,
table 2: the fewest rounds found to pass BigCrush, 13, and JAX itself uses 20).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray, UInt32

from ._stream import Stream


_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 13

KeyData = UInt32[Array, "2"]


def key_data(key: PRNGKeyArray) -> KeyData:
    """Two words of a `jax.random` key of any implementation."""
    check_key(key)
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    if words.shape[0] == 2:
        return words
    return jnp.stack(threefry(words[:2], words[2], words[3]))


def check_key(key: Any) -> None:
    """Raises a `ValueError` unless it is a single key."""
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    ):
        raise ValueError(
            f"The key {key!r} must be one key of `jax.random`, such as `jax.random.key(0)`."
        )


def threefry(
    key: KeyData, first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Two random words for each counter (first, second). Not differentiable."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = first + schedule[0], second + schedule[1]
    for i in range(_ROUNDS):
        rotation = _ROTATIONS[i % 8]
        x = x + y
        y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x = x + schedule[j % 3]
            y = y + schedule[(j + 1) % 3] + np.uint32(j)
    return x, y


def fold(key: KeyData, stream: Stream, index: int | UInt32[Array, ""] = 0) -> KeyData:
    """A key of its own for one stream of random numbers; `index` may be traced."""
    words = threefry(key, jnp.uint32(stream), jnp.asarray(index, jnp.uint32))
    # XLA would make the key again for each number drawn with it.
    return lax.optimization_barrier(jnp.stack(words))
