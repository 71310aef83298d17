"""The latencies of a program's kernels: a mean each, and the shape of the law by kind."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._misc import FrozenArray
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


def kernel_cumulants(
    mean: Float[Array, " kernels"], kind: Int[Array, " kernels"], laws: Sequence[AbstractLatency]
) -> Float[Array, "3 kernels"]:
    """Mean, variance and third central moment of each kernel, in seconds to their power.

    **Arguments:**

    - `mean`: the mean latency of each kernel.
    - `kind`: the index of each kernel's law.
    - `laws`: the laws, of which only the shape counts.
    """
    relative = []
    for law in laws:
        middle = law.mean()
        relative.append(
            jnp.stack(
                [
                    jnp.ones_like(middle),
                    law.variance() / middle**2,
                    law.third_moment() / middle**3,
                ]
            )
        )
    powers = jnp.stack([mean, mean**2, mean**3])
    return jnp.stack(relative, axis=1).astype(mean.dtype)[:, kind] * powers
