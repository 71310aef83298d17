"""Laws by three moments: those of a law on a grid, the shape that cumulants give, and the law of
this shape.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from ._base import AbstractParametric, InFiles, as_parameters, check_held, parameter
from ._scores import step_score


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


# E. B. Wilson and M. M. Hilferty, "The distribution of chi-square", 1931: the cube root of a gamma
# variable is close to normal.
def cube_normal(z: Float[Array, "..."], skewness: Float[Array, "..."]) -> Float[Array, "..."]:
    """The standardised three-moment variable whose standard normal score is `z`.

    **Arguments:**

    - `z`: scores.
    - `skewness`: the skewness; zero gives `z` back.

    **Returns:**

    Values of mean zero and standard deviation one, to the fifth order of the skewness.
    """
    t = z / 6.0 - skewness / 36.0
    gt = skewness * t
    return 6.0 * t * (1.0 + gt * (1.0 + gt / 3.0))


def cube_normal_score(y: Float[Array, "..."], skewness: Float[Array, "..."]) -> Float[Array, "..."]:
    """The standard normal score of a standardised value: the inverse of `cube_normal`.

    **Arguments:**

    - `y`: standardised values.
    - `skewness`: the skewness.

    **Returns:**

    Scores.
    """
    cube = 1.0 + 0.5 * skewness * y
    # The derivative of the cube root is infinite at zero, the flat point of the cube.
    root = jnp.cbrt(jnp.where(cube == 0, jnp.finfo(cube.dtype).tiny, cube))
    return 3.0 * y / (root * (root + 1.0) + 1.0) + skewness / 6.0


def _hermite(skewness: Float[Array, "..."]) -> tuple[Array, Array, Array, Array]:
    """The coefficients of `cube_normal` in Hermite polynomials of the score."""
    slope = 1.0 - skewness**2 / 36.0
    second = skewness * slope / 6.0
    third = skewness**2 / 108.0
    zeroth = cube_normal(jnp.zeros_like(skewness), skewness) + second
    return zeroth, slope**2 + 3.0 * third, second, third


class ThreeMoment(AbstractParametric):
    r"""A latency given by its mean, standard deviation and skewness: the cube of a normal.

    It agrees with a shifted gamma law to about 1e-4 of a standard deviation, mirrored if the
    skewness is negative, and is normal if the skewness is zero. It costs a few multiplications and
    is smooth in the skewness. The three moments are matched to fifth order in the skewness (at
    skewness one, the mean is within 5e-5 standard deviations), so keep the skewness between about
    -1 and 1. The law is not truncated at zero.
    """

    in_files: ClassVar[InFiles] = InFiles(
        "three-moment", ("std", "skewness"), lambda std, skewness: ThreeMoment(1.0, std, skewness)
    )

    location: Float[Array, "..."] = parameter("finite")
    std: Float[Array, "..."] = parameter("finite and at least 0")
    skewness: Float[Array, "..."] = parameter("finite")

    def __init__(self, location: ArrayLike, std: ArrayLike, skewness: ArrayLike):
        """**Arguments:**

        - `location`: the mean, in seconds.
        - `std`: the standard deviation, in seconds. Must be non-negative; zero gives a constant.
        - `skewness`: the third central moment over the cube of the standard deviation; keep it
            between about -1 and 1.
        """
        self.location, self.std, self.skewness = as_parameters(location, std, skewness)
        check_held("location", location, self.location)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.location + self.std * cube_normal(jnp.asarray(z, self.dtype), self.skewness)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        difference = jnp.asarray(x, self.dtype) - self.location
        varies = self.std > 0
        y = difference / jnp.where(varies, self.std, 1.0)
        return jnp.where(varies, cube_normal_score(y, self.skewness), step_score(difference))

    def mean(self) -> Float[Array, "..."]:
        zeroth, *_ = _hermite(self.skewness)
        return self.location + self.std * zeroth

    def variance(self) -> Float[Array, "..."]:
        _, b1, b2, b3 = _hermite(self.skewness)
        variance = self.std**2 * (b1**2 + 2.0 * b2**2 + 6.0 * b3**2)
        return jnp.broadcast_to(variance, self.batch_shape)

    def third_moment(self) -> Float[Array, "..."]:
        _, b1, b2, b3 = _hermite(self.skewness)
        moment = b2 * (6.0 * b1**2 + 8.0 * b2**2 + 36.0 * b1 * b3 + 108.0 * b3**2)
        return jnp.broadcast_to(self.std**3 * moment, self.batch_shape)
