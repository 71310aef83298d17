"""A law made wider or narrower around its mean."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._base import AbstractLatency
from ._constant import Constant
from ._gamma import Gamma
from ._lognormal import LogNormal
from ._normal import Normal
from ._transform import Scaled, Shifted


def widen(law: AbstractLatency, factor: ArrayLike) -> AbstractLatency:
    """The same law with its spread multiplied, and its mean kept.

    **Arguments:**

    - `law`: any law.
    - `factor`: not negative. It multiplies the parameter that says how wide the law is, where there
        is one (of a log-normal law `sigma`, of a gamma law `cv`, of a normal law `std`), and the
        deviation from the mean where there is none. Zero leaves the mean alone.

    **Returns:**

    A law. Differentiable in `factor` and the parameters.
    """
    match law:
        case Constant():
            return law
        case LogNormal():
            sigma = law.sigma * factor
            return LogNormal(law.median * jnp.exp(0.5 * (law.sigma**2 - sigma**2)), sigma)
        case Gamma():
            return eqx.tree_at(lambda one: one.cv, law, law.cv * factor)
        case Normal():
            return eqx.tree_at(lambda one: one.std, law, law.std * factor)
        case Scaled():
            return Scaled(widen(law.base, factor), law.factor)
        case _:
            return Shifted(Scaled(law, factor), (1 - jnp.asarray(factor, law.dtype)) * law.mean())
