"""A law made wider or narrower around its mean."""

import functools as ft
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from ._base import AbstractLatency
from ._transform import Scaled, Shifted


# The files of the families say what it is for them.
@ft.singledispatch
def widen(law: AbstractLatency, factor: ArrayLike) -> Any:
    """The same law with its spread multiplied, and its mean kept.

    **Arguments:**

    - `law`: any law.
    - `factor`: not negative. It multiplies the parameter that says how wide the law is, where there
        is one (of a log-normal law `sigma`, of a gamma law `cv`, of a normal law `std`), and the
        deviation from the mean where there is none. Zero leaves the mean alone.

    **Returns:**

    A law, of latencies or what else is registered. Differentiable in `factor` and the parameters.
    """
    return Shifted(Scaled(law, factor), (1 - jnp.asarray(factor, law.dtype)) * law.mean())


@widen.register(Scaled)
def _(law, factor):
    return Scaled(widen(law.base, factor), law.factor)
