import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractParametric, InFiles, as_parameters, check_held, parameter
from ._scores import expectation, log_ndtr, score_of_tails, step_score


class Weibull(AbstractParametric):
    r"""A Weibull latency, with survival function $\exp(-(x / \lambda)^k)$; shape one is the
    exponential law.
    """

    in_files: ClassVar[InFiles] = InFiles("weibull", ("shape",), lambda shape: Weibull(1.0, shape))

    scale: Float[Array, "..."] = parameter("finite and at least 0")
    shape: Float[Array, "..."] = parameter("positive")

    def __init__(self, scale: ArrayLike, shape: ArrayLike):
        r"""**Arguments:**

        - `scale`: the scale $\lambda$, in seconds, which is exceeded with probability $1 / e$. Must
            be non-negative.
        - `shape`: the shape $k$. Must be positive; infinity gives a constant.
        """
        self.scale, self.shape = as_parameters(scale, shape)
        check_held("scale", scale, self.scale)

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        # Its error is small for CVs from 0.01 to 1 (Justus et al. 1978).
        return {"shape": (math.sqrt(variance) / mean) ** -1.086}

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        log_hazard = jnp.log(-log_ndtr(-jnp.asarray(z, self.dtype)))
        return self.scale * jnp.exp(log_hazard / self.shape)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        varies = (x > 0) & (self.scale > 0) & jnp.isfinite(self.shape)
        ratio = jnp.where(varies, x, 1.0) / jnp.where(varies, self.scale, 1.0)
        log_hazard = jnp.where(varies, self.shape, 1.0) * jnp.log(ratio)
        # Past these the score is beyond every sample, and its derivatives must stay finite.
        limit = 0.9 * float(np.log(jnp.finfo(x.dtype).max))
        hazard = jnp.exp(jnp.clip(log_hazard, -limit, min(limit, 12.0)))
        small = hazard < 1e-3
        log_cdf = jnp.where(small, jnp.log(hazard) - 0.5 * hazard, jnp.log(-jnp.expm1(-hazard)))
        return jnp.where(varies, score_of_tails(log_cdf, -hazard), step_score(x - self.scale))

    def mean(self) -> Float[Array, "..."]:
        return self.scale * jnp.exp(gammaln(1.0 + 1.0 / self.shape))

    # The closed forms of the higher moments cancel where the shape is large; this does not.
    def _central_moment(self, order: int) -> Float[Array, "..."]:
        mean = self.mean()
        return expectation(lambda z: (self.from_normal(z) - mean) ** order, self.dtype)

    def variance(self) -> Float[Array, "..."]:
        return self._central_moment(2)

    def third_moment(self) -> Float[Array, "..."]:
        return self._central_moment(3)
