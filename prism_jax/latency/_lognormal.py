import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._misc import bisect
from ._base import AbstractLatency, InFiles
from ._log_sigma import log_sigma
from ._parameters import Rule, as_parameters, broadcast_batch, check_held, non_negative
from ._scale_spread import scale_spread
from ._scores import step_score


_HALVINGS = 60


def _score(x: Array, median: Array, sigma: Array) -> Array:
    varies = (sigma > 0) & (median > 0) & (x > 0)
    ratio = jnp.where(varies, x, 1.0) / jnp.where(varies, median, 1.0)
    score = jnp.log(ratio) / jnp.where(varies, sigma, 1.0)
    return jnp.where(varies, score, step_score(x - median))


def _variance(median: Array, sigma: Array) -> Array:
    return median**2 * jnp.exp(sigma**2) * jnp.expm1(sigma**2)


def _third_moment(median: Array, sigma: Array) -> Array:
    growth = jnp.expm1(sigma**2)
    return (median * jnp.exp(0.5 * sigma**2)) ** 3 * growth**2 * (growth + 3.0)


class LogNormal(AbstractLatency):
    r"""A log-normal latency, $m \exp(\sigma z)$.

    Parametrised by its median, which is what a profile reports; a change of `sigma` leaves it
    unchanged.
    """

    in_files: ClassVar[InFiles | None] = InFiles(
        "lognormal", ("sigma",), lambda sigma: LogNormal(1.0, sigma)
    )

    median: Float[Array, "..."]
    sigma: Float[Array, "..."]

    def __init__(self, median: ArrayLike, sigma: ArrayLike):
        self.median, self.sigma = as_parameters(median, sigma)
        check_held("median", median, self.median)

    def __check_init__(self) -> None:
        _ = self.batch_shape

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        return {"sigma": float(np.sqrt(np.log1p((math.sqrt(variance) / mean) ** 2)))}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast_batch(self.median.shape, self.sigma.shape)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.median * jnp.exp(self.sigma * jnp.asarray(z, self.dtype))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return _score(jnp.asarray(x, self.dtype), self.median, self.sigma)

    def mean(self) -> Float[Array, "..."]:
        return self.median * jnp.exp(0.5 * self.sigma**2)

    def variance(self) -> Float[Array, "..."]:
        return _variance(self.median, self.sigma)

    def third_moment(self) -> Float[Array, "..."]:
        return _third_moment(self.median, self.sigma)

    def rules(self) -> tuple[Rule, ...]:
        return (non_negative("median", self.median), non_negative("sigma", self.sigma))


LogNormal.__init__.__doc__ = """**Arguments:**

- `median`: the median, in seconds. Must be non-negative.
- `sigma`: the standard deviation of the logarithm. Must be non-negative; zero gives a constant.
"""


@log_sigma.register(LogNormal)
def _(law):
    return law.sigma


@scale_spread.register(LogNormal)
def _(law, factor):
    sigma = law.sigma * factor
    return LogNormal(law.median * jnp.exp(0.5 * (law.sigma**2 - sigma**2)), sigma)


class ShiftedLogNormal(AbstractLatency):
    r"""A log-normal latency added to a minimum latency, $s + m \exp(\sigma z)$."""

    in_files: ClassVar[InFiles | None] = InFiles(
        "shifted-lognormal",
        ("sigma", "shift"),
        lambda sigma, shift: ShiftedLogNormal(shift, 1.0, sigma),
    )

    shift: Float[Array, "..."]
    median: Float[Array, "..."]
    sigma: Float[Array, "..."]

    def __init__(self, shift: ArrayLike, median: ArrayLike, sigma: ArrayLike):
        self.shift, self.median, self.sigma = as_parameters(shift, median, sigma)

    def __check_init__(self) -> None:
        _ = self.batch_shape

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
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast_batch(self.shift.shape, self.median.shape, self.sigma.shape)

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        return self.shift + self.median * jnp.exp(self.sigma * jnp.asarray(z, self.dtype))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        return _score(jnp.asarray(x, self.dtype) - self.shift, self.median, self.sigma)

    def mean(self) -> Float[Array, "..."]:
        return self.shift + self.median * jnp.exp(0.5 * self.sigma**2)

    def variance(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(_variance(self.median, self.sigma), self.batch_shape)

    def third_moment(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(_third_moment(self.median, self.sigma), self.batch_shape)

    def rules(self) -> tuple[Rule, ...]:
        return (
            non_negative("shift", self.shift),
            non_negative("median", self.median),
            non_negative("sigma", self.sigma),
        )


ShiftedLogNormal.__init__.__doc__ = """**Arguments:**

- `shift`: the minimum latency $s$, in seconds. Must be non-negative.
- `median`: the median $m$ of the log-normal part, in seconds. Must be non-negative.
- `sigma`: the standard deviation of the logarithm of that part. Must be non-negative; zero gives a
    constant.
"""
