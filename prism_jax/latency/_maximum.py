import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency
from ._parameters import Rule
from ._scores import expectation, log_ndtr, ndtri_exp


def score_of_maximum(z: Float[Array, "..."], count: ArrayLike) -> Float[Array, "..."]:
    r"""The score $z'$ of one copy where the slowest of `count` has the score $z$:
    $\Phi(z') = \Phi(z)^{1/n}$, accurate in both tails.
    """
    count = jnp.asarray(count, z.dtype)
    return jnp.where(count > 1, ndtri_exp(log_ndtr(z) / count), z)


class Maximum(AbstractLatency):
    r"""The slowest of several independent copies of another latency.

    A score $z$ of the maximum is the score $z'$ of a copy, with $\Phi(z') = \Phi(z)^{1/n}$. The
    moments are by a fixed rule over $z$: exact to rounding for smooth families, and within about a
    thousandth of a jump of the quantile function (a mixture of narrow, distant parts).
    """

    base: AbstractLatency
    count: int = eqx.field(static=True)

    def __check_init__(self):
        if self.count < 1:
            raise ValueError(f"`Maximum` got `count={self.count}`; it must be at least 1.")

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.base.batch_shape

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.base.from_normal(score_of_maximum(jnp.asarray(z, self.dtype), self.count))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        z = self.base.to_normal(x)
        if self.count > 1:
            z = ndtri_exp(self.count * log_ndtr(z))
        return z

    def mean(self) -> Float[Array, "..."]:
        return expectation(self.from_normal, self.dtype)

    def _central_moment(self, order: int) -> Float[Array, "..."]:
        mean = self.mean()
        return expectation(lambda z: (self.from_normal(z) - mean) ** order, self.dtype)

    def variance(self) -> Float[Array, "..."]:
        return self._central_moment(2)

    def third_moment(self) -> Float[Array, "..."]:
        return self._central_moment(3)

    def _rules(self) -> tuple[Rule, ...]:
        return ()


Maximum.__init__.__doc__ = """**Arguments:**

- `base`: the latency of one copy.
- `count`: the number of copies. Must be at least one; static.
"""
