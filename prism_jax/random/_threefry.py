"""Counter-based random numbers: those of a sample depend only on its id, a counter and the key.

Threefry-2x32 with 13 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11,
table 2: the fewest rounds found to pass BigCrush, 13, and JAX itself uses 20).
"""

import contextlib
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from .._misc import quoted
from ._elementary import cos_half_turns, log, sin_half_turns


_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 13

KeyData = UInt32[Array, "2"]
# Within a kernel, whose arrays are not cut into numbers, they are two.
_Words = KeyData | tuple[UInt32[Array, ""], UInt32[Array, ""]]


class Stream(enum.IntEnum):
    """The purposes of random numbers. Each has a key of its own, so that draws for one purpose are
    independent of those for another.

    The numbers define the meaning of a key: changing one changes results.
    """

    OPS = 0
    RANKS = 1
    MICROBATCHES = 2
    STALLS = 3
    LEAD = 5
    WORKER_STEPS = 6
    OTHER_GPUS = 7
    LOADS = 8
    STEPS = 100
    REPLICAS = 101
    NETWORK = 102
    UNLIKE = 200  # Replicas that are unlike the others.


# In quotes, for `help` writes the class as `jax.jaxlib._jax.Array`.
def key_data(key: "jax.Array") -> KeyData:
    """Two words of a `jax.random` key of any implementation."""
    check_key(key)
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    if words.shape[0] == 2:
        return words
    return jnp.stack(threefry(words[:2], words[2], words[3]))


def check_key(key: Any) -> None:
    """Raises a `ValueError` unless it is a single key, perhaps a raw one."""
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return
        if key.dtype == np.uint32 and key.ndim == 1:
            with contextlib.suppress(TypeError):  # Of a length that keys do not have.
                jax.random.wrap_key_data(key)
                return
    raise ValueError(
        f"The key {quoted(key)} must be one key of `jax.random`, such as `jax.random.key(0)`."
    )


@jax.jit  # Traced and lowered once for each shape.
def threefry(
    key: _Words, first: UInt32[Array, "*shape"], second: UInt32[Array, "*shape"]
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


def normals(
    key: _Words,
    sample_ids: UInt32[Array, "*ids"],
    counters: UInt32[Array, "*counters"],
    dtype: jnp.dtype,
) -> Float[Array, "*shape"]:
    """A standard normal for each counter and sample: the first of its pair of `normal_pairs`."""
    return normal_pairs(key, sample_ids, counters, dtype)[0]


def normal_pairs(
    key: _Words,
    sample_ids: UInt32[Array, "*ids"],
    counters: UInt32[Array, "*counters"],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Two standard normals for each counter and sample, by the transform of Box and Muller ("A note
    on the generation of random normal deviates", 1958).

    The radius has a uniform of 32 bits, rounded to the dtype, so that normals reach 6.8; so has the
    angle. In float32 they are within 1e-6 of the results of exact arithmetic with these uniforms (a
    test measures it).

    **Arguments:**

    - `sample_ids`, `counters`: arrays whose shapes broadcast, such as `(samples,)` and `(ops, 1)`.
    """
    first, second = _words(key, sample_ids, counters)
    uniform = (first.astype(dtype) + dtype.type(0.5)) * dtype.type(2.0**-32)
    radius = jnp.sqrt(dtype.type(-2) * log(uniform))
    # The sine over half a circle has the law of that over the whole. The cosine there is positive:
    # the last bit, too small for most angles in float32, is its sign.
    half_turns = lax.bitcast_convert_type(second, jnp.int32).astype(dtype) * dtype.type(2.0**-32)
    cosine = radius * cos_half_turns(half_turns)
    is_odd = (second & np.uint32(1)) != np.uint32(0)
    return radius * sin_half_turns(half_turns), jnp.where(is_odd, -cosine, cosine)


def counters(number: int) -> UInt32[Array, "number 1"]:
    """Counters of `number` draws for each sample."""
    return jnp.arange(number, dtype=jnp.uint32)[:, None]


def uniforms(
    key: KeyData,
    sample_ids: UInt32[Array, "*ids"],
    counters: UInt32[Array, "*counters"],
    dtype: jnp.dtype,
) -> Float[Array, "*shape"]:
    """A uniform in (0, 1) for each counter and sample, of 23 bits in float32 and 32 in float64.
    Shapes are as for `normals`.
    """
    word, _ = _words(key, sample_ids, counters)
    drop = 0 if dtype == jnp.float64 else 9
    integers = (word >> np.uint32(drop)).astype(dtype) + dtype.type(0.5)
    return integers * dtype.type(2.0 ** (drop - 32))


def _words(key: _Words, sample_ids: UInt32[Array, "*ids"], counters: UInt32[Array, "*counters"]):
    shape = np.broadcast_shapes(counters.shape, sample_ids.shape)
    return threefry(key, jnp.broadcast_to(sample_ids, shape), jnp.broadcast_to(counters, shape))
