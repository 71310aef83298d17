"""Standard normal scores: the tails of the normal law, their inverse, and expectations."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr as _log_ndtr, ndtr, ndtri
from jax.typing import ArrayLike
from jaxtyping import Array, Float


# Scores beyond this are as good as infinite, and their squares still fit in every dtype.
_LARGEST = 1000.0
_LOG_2_PI = float(np.log(2 * np.pi))


def log_density(z: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$\log \varphi(z)$."""
    return -0.5 * (z * z + _LOG_2_PI)


@jax.jit  # Traced once for each shape.
def log_ndtr(z: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$\log \Phi(z)$, to full relative accuracy in both tails.

    That of `jax.scipy` loses the digits of $1 - \Phi$ for scores between about 2 and 8. Infinite
    scores give finite values, so that sums over the parts of a mixture have finite derivatives.
    """
    z = jnp.clip(z, -_LARGEST, _LARGEST)
    upper = z > 0
    lower = _log_ndtr(jnp.where(upper, -1.0, z))
    return jnp.where(upper, jnp.log1p(-ndtr(-jnp.where(upper, z, 1.0))), lower)


@jax.custom_jvp
def ndtri_exp(log_p: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""The score $z$ with $\log \Phi(z)$ given, in both tails: the inverse of `log_ndtr`."""
    info = jnp.finfo(log_p.dtype)
    # Below this the probability itself is subnormal.
    deepest = float(np.log(info.tiny)) + 4.0
    body = ndtri(jnp.exp(jnp.clip(log_p, deepest, -0.5)))
    upper = -ndtri(jnp.clip(-jnp.expm1(log_p), info.tiny, 0.5))
    lower = jnp.clip(log_p, -0.5 * _LARGEST**2, deepest)
    z = -jnp.sqrt(-2.0 * lower - jnp.log(-4.0 * np.pi * lower))
    for _ in range(3):
        log_p_z = _log_ndtr(z)
        z = z - (log_p_z - lower) * jnp.exp(log_p_z - log_density(z))
    z = jnp.where(log_p < deepest, z, jnp.where(log_p < -0.5, body, upper))
    return jnp.where(log_p < 0, z, jnp.inf)


@ndtri_exp.defjvp
def _(primals, tangents):
    (log_p,), (tangent,) = primals, tangents
    z = ndtri_exp(log_p)
    finite = jnp.isfinite(z)
    slope = jnp.exp(jnp.where(finite, log_p - log_density(jnp.where(finite, z, 0.0)), 0.0))
    return z, jnp.where(finite, slope, 0.0) * tangent


def score_of_tails(
    log_cdf: Float[Array, "..."], log_survival: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The score of a value, from whichever tail probability is the smaller."""
    low = log_cdf < log_survival
    score = ndtri_exp(jnp.where(low, log_cdf, log_survival))
    return jnp.where(low, score, -score)


def score_of_maximum(z: Float[Array, "..."], count: ArrayLike) -> Float[Array, "..."]:
    r"""The score $z'$ of one copy where the slowest of `count` has the score $z$:
    $\Phi(z') = \Phi(z)^{1/n}$, accurate in both tails.
    """
    count = jnp.asarray(count, z.dtype)
    return jnp.where(count > 1, ndtri_exp(log_ndtr(z) / count), z)


def step_score(difference: Float[Array, "..."]) -> Float[Array, "..."]:
    """The score of a value under a constant, given the value minus the constant."""
    return jnp.where(difference >= 0, jnp.inf, -jnp.inf).astype(difference.dtype)


@ft.lru_cache
def normal_nodes(dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Some four hundred equidistant scores, and their weights for expectations."""
    # The trapezoidal rule converges exponentially for analytic functions, and is honest for others.
    reach = 9.0 if jnp.finfo(dtype).bits < 64 else 13.0
    z = np.linspace(-reach, reach, int(32 * reach) + 1)
    weights = np.exp(-0.5 * z * z)
    return z, weights / weights.sum()


def expectation(
    function: Callable[[Float[Array, ""]], Float[Array, "..."]], dtype: jnp.dtype
) -> Float[Array, "..."]:
    r"""$\mathrm{E} f(Z)$ for a standard normal $Z$, by the rule of `normal_nodes`."""
    z, weights = normal_nodes(dtype)
    values = jax.vmap(function)(jnp.asarray(z, dtype))
    return jnp.tensordot(jnp.asarray(weights, dtype), values, axes=1)
