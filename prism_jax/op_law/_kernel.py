"""The law of a kernel: a mean of its own, and the cumulants of the law of its kind."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..latency import AbstractLatency, least_std


def unit_of_time(mean: Float[Array, " kernels"]) -> Float[Array, ""]:
    """A unit of time in which no mean latency is above 1.5: a power of two, in seconds, so that a
    change of unit rounds nothing.
    """
    longest = jax.lax.stop_gradient(jnp.max(mean))
    nearest = jax.lax.reduce_precision(longest, jnp.finfo(mean.dtype).nexp, 0)
    return jnp.where(longest > 0, nearest, 1)


def relative_cumulants(laws: Sequence[AbstractLatency], dtype: DTypeLike) -> Float[Array, "3 laws"]:
    """The mean of each law, and its variance and third central moment over powers of the mean."""
    moments = [(law.mean(), law.variance(), law.third_moment()) for law in laws]
    mean, variance, third = map(jnp.stack, zip(*moments, strict=True))
    return jnp.stack([mean, variance / mean**2, third / mean**3]).astype(dtype)


def kernel_cumulants(
    mean: Float[Array, " kernels"], shapes: Float[Array, "3 kernels"]
) -> Float[Array, "3 kernels"]:
    """Mean, variance and third central moment of each kernel, in the unit of the means to their
    power. Kernels whose deviation is so small in this unit that its cube underflows are constant.

    **Arguments:**

    - `mean`: the mean latency of each kernel, in `unit_of_time` all.
    - `shapes`: the law of each, as of `relative_cumulants`, of which only the shape counts.
    """
    variance, third = shapes[1] * mean**2, shapes[2] * mean**3
    varies = variance > least_std(mean.dtype) ** 2
    return jnp.stack([mean, jnp.where(varies, variance, 0), jnp.where(varies, third, 0)])
