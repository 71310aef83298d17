import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._misc import bisect
from ._base import AbstractParametric, InFiles, as_parameters, check_held, parameter
from ._scores import step_score
from ._transform import log_sigma, scale_spread


_HALVINGS = 60


class LogNormal(AbstractParametric):
    r"""A log-normal latency, $m \exp(\sigma z)$.

    Parametrised by its median, which is what a profile reports; a change of `sigma` leaves it
    unchanged.
    """

    in_files: ClassVar[InFiles] = InFiles(
        "lognormal", ("sigma",), lambda sigma: LogNormal(1.0, sigma)
    )

    median: Float[Array, "..."] = parameter("finite and at least 0")
    sigma: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, median: ArrayLike, sigma: ArrayLike):
        """**Arguments:**

        - `median`: the median, in seconds. Must be non-negative.
        - `sigma`: the standard deviation of the logarithm. Must be non-negative; zero gives a
            constant.
        """
        self.median, self.sigma = as_parameters(median, sigma)
        check_held("median", median, self.median)

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        return {"sigma": float(np.sqrt(np.log1p((math.sqrt(variance) / mean) ** 2)))}

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.median * jnp.exp(self.sigma * jnp.asarray(z, self.dtype))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        varies = (self.sigma > 0) & (self.median > 0) & (x > 0)
        ratio = jnp.where(varies, x, 1.0) / jnp.where(varies, self.median, 1.0)
        score = jnp.log(ratio) / jnp.where(varies, self.sigma, 1.0)
        return jnp.where(varies, score, step_score(x - self.median))

    def mean(self) -> Float[Array, "..."]:
        return self.median * jnp.exp(0.5 * self.sigma**2)

    def variance(self) -> Float[Array, "..."]:
        return self.median**2 * jnp.exp(self.sigma**2) * jnp.expm1(self.sigma**2)

    def third_moment(self) -> Float[Array, "..."]:
        growth = jnp.expm1(self.sigma**2)
        return (self.median * jnp.exp(0.5 * self.sigma**2)) ** 3 * growth**2 * (growth + 3.0)


@log_sigma.register(LogNormal)
def _(law):
    return law.sigma


@scale_spread.register(LogNormal)
def _(law, factor):
    sigma = law.sigma * factor
    return LogNormal(law.median * jnp.exp(0.5 * (law.sigma**2 - sigma**2)), sigma)


class ShiftedLogNormal(AbstractParametric):
    r"""A log-normal latency added to a minimum latency, $s + m \exp(\sigma z)$."""

    in_files: ClassVar[InFiles] = InFiles(
        "shifted-lognormal",
        ("sigma", "shift"),
        lambda sigma, shift: ShiftedLogNormal(shift, 1.0, sigma),
    )

    shift: Float[Array, "..."] = parameter("finite and at least 0")
    median: Float[Array, "..."] = parameter("finite and at least 0")
    sigma: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, shift: ArrayLike, median: ArrayLike, sigma: ArrayLike):
        """**Arguments:**

        - `shift`: the minimum latency $s$, in seconds. Must be non-negative.
        - `median`: the median $m$ of the log-normal part, in seconds. Must be non-negative.
        - `sigma`: the standard deviation of the logarithm of that part. Must be non-negative; zero
            gives a constant.
        """
        self.shift, self.median, self.sigma = as_parameters(shift, median, sigma)

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        if not 0.05 < skewness < 20:
            return None

        # The skewness of a log-normal is (w + 2) sqrt(w - 1), w = exp(sigma^2).
        def is_low(sigma: float) -> bool:
            w = np.exp(sigma**2)
            return bool((w + 2) * np.sqrt(w - 1) <= skewness)

        sigma = sum(bisect(is_low, 1e-6, 4.0, _HALVINGS)) / 2
        w = np.exp(sigma**2)
        median = math.sqrt(variance) / mean / np.sqrt(w * (w - 1))
        shift = 1 - median * np.sqrt(w)
        if shift < 0 or median <= 0:
            return None
        return {"sigma": sigma, "shift": float(shift / median)}

    @property
    def _above(self) -> LogNormal:
        """The law of what is above the shift."""
        return LogNormal(self.median, self.sigma)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.shift + self._above.from_normal(z)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return self._above.to_normal(jnp.asarray(x, self.dtype) - self.shift)

    def mean(self) -> Float[Array, "..."]:
        return self.shift + self._above.mean()

    def variance(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(self._above.variance(), self.batch_shape)

    def third_moment(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(self._above.third_moment(), self.batch_shape)
