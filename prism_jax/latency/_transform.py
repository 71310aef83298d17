import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency
from ._parameters import Rule, as_parameters, broadcast_batch, check_held, finite, non_negative
from ._scores import step_score


def _like(value: ArrayLike, base: AbstractLatency) -> Array:
    """An array; a Python number takes the dtype of `base`."""
    return as_parameters(value, np.zeros((), base.dtype))[0]


class Scaled(AbstractLatency):
    """A latency multiplied by a factor."""

    base: AbstractLatency
    factor: Float[Array, "..."]

    def __init__(self, base: AbstractLatency, factor: ArrayLike):
        self.base = base
        self.factor = _like(factor, base)
        check_held("factor", factor, self.factor)

    def __check_init__(self) -> None:
        _ = self.batch_shape

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast_batch(self.base.batch_shape, self.factor.shape)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.factor * self.base.from_normal(z)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        varies = self.factor > 0
        score = self.base.to_normal(x / jnp.where(varies, self.factor, 1.0))
        return jnp.where(varies, score, step_score(x))

    def mean(self) -> Float[Array, "..."]:
        return self.factor * self.base.mean()

    def variance(self) -> Float[Array, "..."]:
        return self.factor**2 * self.base.variance()

    def third_moment(self) -> Float[Array, "..."]:
        return self.factor**3 * self.base.third_moment()

    def rules(self) -> tuple[Rule, ...]:
        return (non_negative("factor", self.factor),)


Scaled.__init__.__doc__ = """**Arguments:**

- `base`: the latency to scale.
- `factor`: the factor. Must be non-negative; broadcasts against the batch of `base`.
"""


class Shifted(AbstractLatency):
    """A latency plus an offset."""

    base: AbstractLatency
    offset: Float[Array, "..."]

    def __init__(self, base: AbstractLatency, offset: ArrayLike):
        self.base = base
        self.offset = _like(offset, base)

    def __check_init__(self) -> None:
        _ = self.batch_shape

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast_batch(self.base.batch_shape, self.offset.shape)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.offset + self.base.from_normal(z)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return self.base.to_normal(jnp.asarray(x, self.dtype) - self.offset)

    def mean(self) -> Float[Array, "..."]:
        return self.offset + self.base.mean()

    def variance(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(self.base.variance(), self.batch_shape)

    def third_moment(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(self.base.third_moment(), self.batch_shape)

    def rules(self) -> tuple[Rule, ...]:
        return (finite("offset", self.offset),)


Shifted.__init__.__doc__ = """**Arguments:**

- `base`: the latency to shift.
- `offset`: the offset, in seconds; broadcasts against the batch of `base`.
"""
