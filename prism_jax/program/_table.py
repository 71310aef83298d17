"""The latencies of a program's kernels: a mean each, and the shape of the law by kind."""

from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._misc import FrozenArray
from ..latency import AbstractLatency


class LatencyTable(eqx.Module):
    """The mean latency of each kernel; the law around it, of mean one, is that of its kind.

    So a mean and a spread are apart: a derivative with respect to one leaves the other as it is.

    **Attributes:**

    - `mean`: in seconds.
    - `kinds`, `sizes`: the names: kernel `k` is `kinds[kind[k]]` at `sizes[k]`.
    - `on_network`: whether a kernel is subject to the network's regime.
    """

    mean: Float[Array, " kernels"]
    kinds: tuple[str, ...] = eqx.field(static=True)
    kind: FrozenArray = eqx.field(static=True)
    sizes: tuple[str, ...] = eqx.field(static=True)
    on_network: FrozenArray = eqx.field(static=True)

    def cumulants(self, residual: Mapping[str, AbstractLatency]) -> Float[Array, "3 kernels"]:
        """Mean, variance and third central moment of each kernel, in seconds to their power, with
        the laws of their kinds given.
        """
        relative = []
        for kind in self.kinds:
            law = residual[kind]
            mean = law.mean()
            relative.append(
                jnp.stack(
                    [jnp.ones_like(mean), law.variance() / mean**2, law.third_moment() / mean**3]
                )
            )
        relative = jnp.stack(relative, axis=1).astype(self.mean.dtype)
        powers = jnp.stack([self.mean, self.mean**2, self.mean**3])
        return relative[:, self.kind.value] * powers
