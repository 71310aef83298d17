import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractParametric, InFiles, as_parameters, check_held, parameter
from ._scores import log_density, step_score
from ._transform import scale_spread


class Normal(AbstractParametric):
    r"""A normal latency, $\mu + \sigma z$, conditioned to be positive.

    The parameters are those before truncation at zero, so `mean()` and `variance()` differ from
    `location` and `std ** 2` if zero is within a few standard deviations of the location.
    Otherwise, the scores are those of the untruncated normal law to the last bit.
    """

    in_files: ClassVar[InFiles] = InFiles("normal", ("std",), lambda std: Normal(1.0, std))

    location: Float[Array, "..."] = parameter("finite and at least 0")
    std: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, location: ArrayLike, std: ArrayLike):
        """**Arguments:**

        - `location`: the mean before truncation, in seconds. Must be non-negative.
        - `std`: the standard deviation before truncation, in seconds. Must be non-negative; zero
            gives a constant.
        """
        self.location, self.std = as_parameters(location, std)
        check_held("location", location, self.location)

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        std = math.sqrt(variance) / mean
        return {"std": std} if std < 0.2 else None  # Wider, truncation at zero changes moments.

    def _truncation(self, z: Float[Array, "..."]) -> tuple[Array, Array]:
        """Standard deviations from zero to the location, and whether truncation matters at `z`."""
        info = jnp.finfo(self.dtype)
        varies = self.std > 0
        depth = jnp.where(varies, self.location / jnp.where(varies, self.std, 1.0), jnp.inf)
        # In these units the correction to a score is about ndtr(-depth) * ndtr(-z) / density(z).
        matters = ndtr(-depth) > 0.5 * float(info.eps) * ndtr(jnp.minimum(z, 0.0))
        return jnp.where(matters, depth, 1.0), matters

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        z = jnp.asarray(z, self.dtype)
        tiny = float(jnp.finfo(self.dtype).tiny)
        depth, matters = self._truncation(z)
        kept = ndtr(depth)
        # `where`, not `minimum`, whose derivative at a tie is a half.
        lower, upper = jnp.where(z > 0, -1.0, z), jnp.where(z > 0, z, 1.0)
        below = ndtri(jnp.clip(ndtr(-depth) + kept * ndtr(lower), tiny, 0.8))
        above = -ndtri(jnp.maximum(kept * ndtr(-upper), tiny))
        score = jnp.where(matters, jnp.where(z > 0, above, below), z)
        x = self.location + self.std * score
        return jnp.where(matters, jnp.maximum(x, 0.0), x)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        tiny = float(jnp.finfo(self.dtype).tiny)
        varies = self.std > 0
        plain = (x - self.location) / jnp.where(varies, self.std, 1.0)
        depth, matters = self._truncation(plain)
        kept = ndtr(depth)
        upper = plain > 0
        cdf = (ndtr(jnp.where(upper, -1.0, plain)) - ndtr(-depth)) / kept
        inside = cdf > tiny
        below = jnp.where(inside, ndtri(jnp.where(inside, cdf, 0.5)), -jnp.inf)
        above = -ndtri(jnp.maximum(ndtr(-jnp.where(upper, plain, 1.0)) / kept, tiny))
        score = jnp.where(matters, jnp.where(upper, above, below), plain)
        score = jnp.where(varies, score, step_score(x - self.location))
        return jnp.where(x >= 0, score, -jnp.inf)

    def _hazard(self) -> tuple[Array, Array]:
        varies = self.std > 0
        # Beyond forty standard deviations the density underflows in every dtype.
        depth = jnp.minimum(self.location, 40.0 * self.std) / jnp.where(varies, self.std, 1.0)
        hazard = jnp.where(varies, jnp.exp(log_density(depth)) / ndtr(depth), 0.0)
        return depth, hazard

    def mean(self) -> Float[Array, "..."]:
        _, hazard = self._hazard()
        return self.location + self.std * hazard

    def variance(self) -> Float[Array, "..."]:
        depth, hazard = self._hazard()
        return self.std**2 * (1.0 - hazard * (depth + hazard))

    def third_moment(self) -> Float[Array, "..."]:
        depth, hazard = self._hazard()
        return self.std**3 * hazard * ((hazard + depth) * (2.0 * hazard + depth) - 1.0)


@scale_spread.register(Normal)
def _(law, factor):
    return eqx.tree_at(lambda normal: normal.std, law, law.std * factor)
