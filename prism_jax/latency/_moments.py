"""Moments: the shape that cumulants give, and those of a law on a grid."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def least_std(dtype: DTypeLike) -> float:
    """The least standard deviation whose cube the dtype holds: 7e-13 in single precision."""
    return float(jnp.finfo(dtype).tiny) ** 0.32


def root(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The square root; zero, with a derivative, of zero."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def shape_of(
    variance: Float[Array, "*shape"], third: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The standard deviation and the skewness; zero, with a derivative, for a constant, and the
    skewness also below `least_std`.
    """
    std = root(variance)
    skewed = std > least_std(std.dtype)
    # Divided three times: XLA turns two divisions in a row into one, by a product that underflows.
    inverse = 1 / jnp.where(skewed, std, 1)
    return std, jnp.where(skewed, third * inverse * inverse * inverse, 0)


def moments_of(
    grid: Float[Array, "*laws points"],
    cdf: Float[Array, "*laws points"],
    step: Float[Array, "*laws"],
) -> tuple[Float[Array, "*laws"], ...]:
    """The mean, the variance and the third central moment of laws, from their distributions on
    grids of a constant `step`. By integrals of the survival above the mean and of the distribution
    below it, so the variance is not a difference of moments.

    Trapezoids are exact for laws as smooth as the grid resolves, except for the kinks of these
    integrands at the mean, where the slope of the first rises by 2 and the second derivative of the
    other by 6. By the Euler-Maclaurin formula they add the Bernoulli polynomials of the mean's
    place between two points.
    """

    def integral(values):
        return jnp.trapezoid(values, axis=-1) * step

    mean = grid[..., -1] - integral(cdf)
    above = jnp.maximum(grid - mean[..., None], 0)
    beneath = jnp.maximum(mean[..., None] - grid, 0)
    place = (mean - grid[..., 0]) / step
    place = place - jax.lax.stop_gradient(jnp.floor(place))
    variance = integral(2 * above * (1 - cdf) + 2 * beneath * cdf)
    variance = variance + step**2 * (place * place - place + 1 / 6)
    third = integral(3 * above**2 * (1 - cdf) - 3 * beneath**2 * cdf)
    return mean, variance, third - step**3 * place * (place - 0.5) * (place - 1)
