"""Laws made of others: scaled, shifted, or with another spread."""

import functools as ft
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency, AbstractParametric, as_parameters, check_held, parameter
from ._scores import step_score


def _like(value: ArrayLike, base: AbstractLatency) -> Array:
    """An array; a Python number takes the dtype of `base`."""
    return as_parameters(value, np.zeros((), base.dtype))[0]


class Scaled(AbstractParametric):
    """A latency multiplied by a factor."""

    base: AbstractLatency
    factor: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, base: AbstractLatency, factor: ArrayLike):
        """**Arguments:**

        - `base`: the latency to scale.
        - `factor`: the factor. Must be non-negative; broadcasts against the batch of `base`.
        """
        self.base = base
        self.factor = _like(factor, base)
        check_held("factor", factor, self.factor)

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


class Shifted(AbstractParametric):
    """A latency plus an offset."""

    base: AbstractLatency
    offset: Float[Array, "..."] = parameter("finite")

    def __init__(self, base: AbstractLatency, offset: ArrayLike):
        """**Arguments:**

        - `base`: the latency to shift.
        - `offset`: the offset, in seconds; broadcasts against the batch of `base`.
        """
        self.base = base
        self.offset = _like(offset, base)

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


# The files of the families say what these two are for them.
@ft.singledispatch
def log_sigma(law: AbstractLatency) -> Float[Array, "..."] | None:
    r"""The $\sigma$ of a law that is a constant times $\exp(\sigma z)$, which needs no table of its
    quantiles; `None` for other laws.
    """
    del law
    return None


@ft.singledispatch
def scale_spread(law: AbstractLatency, factor: ArrayLike) -> Any:
    """The same law with its spread multiplied by a factor. The mean stays the same.

    **Arguments:**

    - `law`: any law.
    - `factor`: a non-negative factor on the parameter that is the spread of the law (`sigma` of a
        log-normal law, `cv` of a gamma law, `std` of a normal law), or, if there is none, on the
        deviation from the mean. Zero leaves only the mean.

    **Returns:**

    A law of the same kind. Differentiable with respect to `factor` and the parameters.
    """
    return Shifted(Scaled(law, factor), (1 - jnp.asarray(factor, law.dtype)) * law.mean())


@scale_spread.register(Scaled)
def _(law, factor):
    return Scaled(scale_spread(law.base, factor), law.factor)
