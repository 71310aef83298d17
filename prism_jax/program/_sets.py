"""Factors of microbatches that were measured together and are drawn together."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..latency import scale_spread


class Sets(eqx.Module):
    """The factors of the data of microbatches, as stretches of measured factors. For each replica
    and step, a place in a stretch is drawn, all places with equal probability, and the microbatches
    take consecutive factors from there. So factors that were measured together stay together.

    Sets of length one make microbatches independent. Only the shape matters, because the engine
    divides by the mean.

    **Attributes:**

    - `factors`: a row of factors for each stretch. A parameter; everything is differentiable with
        respect to it.
    - `length`: how many factors are taken together, at most as many as a row has. Static.
    """

    factors: Float[Array, "stretches factors"]
    length: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.factors.ndim != 2 or not 1 <= self.length <= self.factors.shape[1]:
            raise ValueError(
                f"`Sets` got factors of shape {self.factors.shape} and a length of {self.length}; "
                "give a row for each stretch, none shorter than the length."
            )

    @property
    def dtype(self) -> jnp.dtype:
        """The floating dtype of the factors."""
        return self.factors.dtype

    def mean(self) -> Float[Array, ""]:
        """The mean factor of a microbatch."""
        number, last = self.factors.shape[1], self.factors.shape[1] - self.length
        # The number of places whose microbatches include each factor of a stretch.
        taken = np.minimum(np.arange(number), last) - np.maximum(
            np.arange(number) - self.length, -1
        )
        weights = jnp.asarray(taken / taken.sum(), self.dtype)
        return jnp.mean(self.factors @ weights)

    def problem(self) -> str:
        """The problem with the values, for a message; empty if they are valid."""
        factors = np.asarray(self.factors)
        good = np.all(np.isfinite(factors) & (factors >= 0)) and np.any(factors > 0)
        return "" if good else "its factors must be finite, at least 0, and not all 0"


@scale_spread.register(Sets)
def _(law, factor):
    middle = law.mean()
    return Sets(middle + jnp.asarray(factor, law.dtype) * (law.factors - middle), law.length)
