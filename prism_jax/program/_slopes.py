"""Functions of a few numbers whose derivatives take as much work as many of their values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


Vector = Float[Array, " numbers"]


def keeps_slopes(function: Callable[[Vector], Vector]) -> Callable[[Vector], Vector]:
    """The same function of a vector, whose Jacobian is computed once, however many derivatives are
    taken through it. It should have few results: each takes one pass backward.
    """
    kept = jax.custom_jvp(function)

    @kept.defjvp
    def _(vectors, tangents):
        (vector,), (tangent,) = vectors, tangents
        value, backward = jax.vjp(function, vector)
        (slopes,) = jax.vmap(backward)(jnp.eye(len(value), dtype=value.dtype))
        return value, slopes @ tangent

    return kept
