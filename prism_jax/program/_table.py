"""The latencies of a program's kernels: a mean each, and the shape of the law by kind."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._misc import FrozenArray
from ..collapse import least_std
from ..latency import AbstractLatency


class LatencyTable(eqx.Module):
    """The mean latency of each kernel. The law around it has mean one and depends on the kind only.

    Means and spreads are separate parameters: a derivative with respect to one keeps the other
    fixed.

    **Attributes:**

    - `mean`: the mean latencies, in seconds.
    - `kinds`, `sizes`: names: kernel `k` is `kinds[kind[k]]` at `sizes[k]`.
    - `on_network`: whether the network's regime applies to a kernel.
    - `loading`: for a kernel that is an op by itself, how strongly the factor `f` of its
        microbatch's data acts on it: it takes `1 + loading (f - 1)` times as long, but never a
        negative time. On the compute of other ops, and on all compute if `loading` is `None`, the
        factor acts in full.
    """

    mean: Float[Array, " kernels"]
    kinds: tuple[str, ...] = eqx.field(static=True)
    kind: FrozenArray = eqx.field(static=True)
    sizes: tuple[str, ...] = eqx.field(static=True)
    on_network: FrozenArray = eqx.field(static=True)
    loading: Float[Array, " kernels"] | None = None


def unit_of(mean: Float[Array, " kernels"]) -> Float[Array, ""]:
    """A unit of time in which no mean latency is above two: a power of two, in seconds, so that a
    change of unit rounds nothing.
    """
    longest = jax.lax.stop_gradient(jnp.max(mean))
    _, exponent = jnp.frexp(longest)
    return jnp.where(longest > 0, jnp.ldexp(jnp.ones_like(longest), exponent - 1), 1)


def relative_cumulants(laws: Sequence[AbstractLatency], dtype: DTypeLike) -> Float[Array, "3 laws"]:
    """The mean of each law, and its variance and third central moment over powers of the mean."""
    columns = []
    for law in laws:
        mean = law.mean()
        column = [mean, law.variance() / mean**2, law.third_moment() / mean**3]
        columns.append(jnp.stack(column).astype(dtype))
    return jnp.stack(columns, axis=1)


def kernel_cumulants(
    mean: Float[Array, " kernels"], shapes: Float[Array, "3 kernels"]
) -> Float[Array, "3 kernels"]:
    """Mean, variance and third central moment of each kernel, in the unit of the means to their
    power. Kernels whose deviation is so small in this unit that its cube underflows are constant.

    **Arguments:**

    - `mean`: the mean latency of each kernel, in `unit_of` all.
    - `shapes`: the law of each, as of `relative_cumulants`, of which only the shape counts.
    """
    variance, third = shapes[1] * mean**2, shapes[2] * mean**3
    varies = variance > least_std(mean.dtype) ** 2
    return jnp.stack([mean, jnp.where(varies, variance, 0), jnp.where(varies, third, 0)])
