"""Counter-based random numbers: what a sample sees depends on its id and the key, on nothing else.

Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11,
table 2: the fewest rounds found to pass BigCrush, 13, and JAX itself uses 20).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, UInt32


_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 13

KeyData = UInt32[Array, "2"]


def key_data(key: PRNGKeyArray) -> KeyData:
    """Two words of a `jax.random` key of any implementation."""
    if not isinstance(key, jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    ):
        raise ValueError(
            f"The key {key!r} must be one key of `jax.random`, such as `jax.random.key(0)`."
        )
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    if words.shape[0] == 2:
        return words
    return jnp.stack(threefry(words[:2], words[2], words[3]))


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


def fold(key: KeyData, domain: int, index: int | UInt32[Array, ""] = 0) -> KeyData:
    """A key of its own for one purpose; `index` may be traced."""
    return jnp.stack(threefry(key, jnp.uint32(domain), jnp.asarray(index, jnp.uint32)))


def normals(
    key: KeyData,
    sample_ids: UInt32[Array, " samples"],
    counters: UInt32[Array, " pairs"],
    dtype: jnp.dtype,
) -> Float[Array, "draws samples"]:
    """Two standard normals for each counter and sample: rows `i` and `i + pairs`.

    Uniforms have 23 bits in float32 and 32 bits in float64, are symmetric about a half, and are
    never 0 or 1, so that normals stay within 5.3 and 6.4.
    """
    shape = (counters.shape[0], sample_ids.shape[0])
    words = threefry(
        key,
        jnp.broadcast_to(sample_ids[None, :], shape),
        jnp.broadcast_to(counters[:, None], shape),
    )
    return jnp.concatenate([_normal(word, dtype) for word in words])


def uniforms(
    key: KeyData, sample_ids: UInt32[Array, " samples"], counter: int, dtype: jnp.dtype
) -> tuple[Float[Array, " samples"], Float[Array, " samples"]]:
    """Two uniforms in (0, 1) for each sample."""
    first, second = threefry(key, sample_ids, jnp.full_like(sample_ids, counter))
    return (_symmetric(first, dtype) + 1) / 2, (_symmetric(second, dtype) + 1) / 2


def _symmetric(word, dtype):
    """A uniform in (-1, 1), on the midpoints of equal intervals."""
    drop = 0 if dtype == jnp.float64 else 9
    scale = 2.0 ** (drop - 31)
    return (word >> np.uint32(drop)).astype(dtype) * dtype.type(scale) + dtype.type(scale / 2 - 1)


def _normal(word, dtype):
    return dtype.type(np.sqrt(2)) * lax.erf_inv(_symmetric(word, dtype))
