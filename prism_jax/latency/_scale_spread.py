"""A law made wider or narrower around its mean."""

import functools as ft
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from ._base import AbstractLatency
from ._transform import Scaled, Shifted


# The files of the families say what it is for them.
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
