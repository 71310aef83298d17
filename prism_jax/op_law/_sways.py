"""What the load of a layer gives to all ops of a microbatch: how far each goes with it.

A microbatch is routed once in each layer. So the dispatch, the experts, the combine, the
recomputation and the backward all have the load of the same fullest member. To first order, each of
these pieces takes its mean and `s D`, where `D` is the deviation of that load in units of its
standard deviation. In a class of ops the pieces of one layer add up, and layers are independent.
With `n` layers in a stage, whose pieces are alike, the sum over layers is `S / n` times that of
their `n` variates: `S / sqrt(n)` times one standardised variate, which all ops of the stage and
microbatch share. Where a class has the pieces of some layers only, this is its part in the sum.

The arrays here have four rows: sums over pieces of `s`, of `s` times the skewness of the load, of
`s^2` and of `s^3` times that skewness. The last two are contained in the cumulants of the class, in
which pieces are independent, and are taken out of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..latency import shape_of
from ..loads import Fullest


# What is left without loads may be nearly constant; its third moment is then rounding.
_MOST_SKEWNESS = 1.0


def sways_of_kernels(
    loads: Float[Array, "loads kernels"], mean: Float[Array, " kernels"], load: Fullest
) -> Float[Array, "2 kernels"]:
    """By how much a standard deviation of the fullest load lengthens each kernel; and the same
    times the load's skewness.
    """
    std, skewness = shape_of(load.load[1], load.load[2])
    return jnp.stack([std, std * skewness]) @ loads * mean[None]


def of_pieces(sway: Float[Array, "2 *shape"]) -> Float[Array, "4 *shape"]:
    """All rows of pieces, from the first two."""
    std, skewed = sway
    return jnp.stack([std, skewed, std**2, std**2 * skewed])


def share_of_load(
    variance: Float[Array, " segments"],
    of_load: Float[Array, " segments"],
    deciding: Float[Array, " segments"],
) -> Float[Array, " segments"]:
    """How far the slowest member of a segment is the fullest one: the slope of the segment's end on
    the end of the fullest member.

    **Arguments:**

    - `variance`, `of_load`: of a member's end, and the part of it by its load.
    - `deciding`: how many members can decide. One that always decides is the fullest; of many, one
        whose noise is as large as its load hardly ever is. In between this interpolates.
    """
    there = of_load > 0
    share = jnp.where(there, of_load, 1) / jnp.where(there, jnp.maximum(variance, of_load), 1)
    return share ** (1 - 1 / jnp.maximum(deciding, 1))


def apart_from_loads(
    whole: Float[Array, "3 *classes nodes"],
    sways: Float[Array, "4 *classes"],
) -> Float[Array, "3 *classes nodes"]:
    """The cumulants without the parts by loads."""
    variance = jnp.maximum(whole[1] - sways[2][..., None], 0)
    most = _MOST_SKEWNESS * variance**1.5
    third = jnp.clip(whole[2] - sways[3][..., None], -most, most)
    return jnp.stack([whole[0], variance, third])


def shared_by_ops(
    sways: Float[Array, "4 classes regimes"], layers: Float[Array, " classes"]
) -> Float[Array, "2 classes regimes"]:
    """The standard deviation and the skewness of what ops of a stage and microbatch share."""
    std, skewed, *_ = sways
    there = std > 0
    root = jnp.sqrt(jnp.maximum(layers, 1))[None, :, None]
    return jnp.stack([std, jnp.where(there, skewed / jnp.where(there, std, 1), 0)]) / root
