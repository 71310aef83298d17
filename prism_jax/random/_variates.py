"""Normals and uniforms, from the words of Threefry."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from ._elementary import log, sin_half_turns
from ._threefry import KeyData, threefry


def normals(
    key: KeyData,
    sample_ids: UInt32[Array, "*ids"],
    counters: UInt32[Array, "*counters"],
    dtype: jnp.dtype,
) -> Float[Array, "*shape"]:
    """A standard normal for each counter and sample, by the transform of Box and Muller ("A note on
    the generation of random normal deviates", 1958).

    The radius has a uniform of 32 bits, rounded to the dtype, so that normals reach 6.8; so has the
    angle. In float32 they are within 1e-6 of the results of exact arithmetic with these uniforms (a
    test measures it). The second normal of each pair of words is not computed, because XLA would
    draw the words again for it.

    **Arguments:**

    - `sample_ids`, `counters`: arrays whose shapes broadcast, such as `(samples,)` and `(ops, 1)`.
    """
    shape = np.broadcast_shapes(counters.shape, sample_ids.shape)
    first, second = threefry(
        key, jnp.broadcast_to(sample_ids, shape), jnp.broadcast_to(counters, shape)
    )
    uniform = (first.astype(dtype) + dtype.type(0.5)) * dtype.type(2.0**-32)
    radius = jnp.sqrt(dtype.type(-2) * log(uniform))
    # The sine over half a circle has the law of that over the whole.
    half_turns = lax.bitcast_convert_type(second, jnp.int32).astype(dtype) + dtype.type(0.5)
    return radius * sin_half_turns(half_turns * dtype.type(2.0**-32))


def counters(number: int) -> UInt32[Array, "number 1"]:
    """Counters of `number` draws for each sample."""
    return jnp.arange(number, dtype=jnp.uint32)[:, None]


def uniforms(
    key: KeyData,
    sample_ids: UInt32[Array, "*ids"],
    counters: UInt32[Array, "*counters"],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Two uniforms in (0, 1) for each counter and sample, of 23 bits in float32 and 32 in float64.
    Shapes are as for `normals`.
    """
    shape = np.broadcast_shapes(counters.shape, sample_ids.shape)
    words = threefry(key, jnp.broadcast_to(sample_ids, shape), jnp.broadcast_to(counters, shape))
    drop = 0 if dtype == jnp.float64 else 9
    first, second = (
        ((word >> np.uint32(drop)).astype(dtype) + dtype.type(0.5)) * dtype.type(2.0 ** (drop - 32))
        for word in words
    )
    return first, second
