from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import (
    AbstractParametric,
    InFiles,
    as_parameters,
    broadcast_batch,
    check_held,
    parameter,
)
from ._scores import step_score
from ._transform import log_sigma, scale_spread


class Constant(AbstractParametric):
    """A latency that does not vary."""

    in_files: ClassVar[InFiles] = InFiles("constant", (), lambda: Constant(1.0))

    value: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, value: ArrayLike):
        """**Arguments:**

        - `value`: the latency, in seconds. Must be non-negative.
        """
        (self.value,) = as_parameters(value)
        check_held("value", value, self.value)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        shape = broadcast_batch(jnp.shape(z), self.batch_shape)
        return jnp.broadcast_to(self.value, shape)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return step_score(jnp.asarray(x, self.dtype) - self.value)

    def mean(self) -> Float[Array, "..."]:
        return self.value

    def variance(self) -> Float[Array, "..."]:
        return jnp.zeros_like(self.value)

    def third_moment(self) -> Float[Array, "..."]:
        return jnp.zeros_like(self.value)


@log_sigma.register(Constant)
def _(law):
    return jax.device_put(np.zeros(law.value.shape, law.dtype))


@scale_spread.register(Constant)
def _(law, factor):
    return law
