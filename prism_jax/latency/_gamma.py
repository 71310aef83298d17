import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, gammainc, gammaincc, gammaln
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractParametric, InFiles, as_parameters, check_held, parameter
from ._gamma_series import temme_series
from ._scores import log_density, log_ndtr, score_of_tails, step_score
from ._transform import scale_spread


# Within this |eta| the series of the normal limit converge fast.
_REACH = 1.5
_MAX_STEPS = 60


def _is_double(x: Array) -> bool:
    return jnp.finfo(x.dtype).bits == 64


def _least_shape(x: Array) -> float:
    """The shape from which the normal limit is accurate to rounding."""
    return 64.0 if _is_double(x) else 16.0


def _polynomial(coefficients: np.ndarray, x: Array, reach: float, scale: float = 1.0) -> Array:
    """Horner's rule, without the terms that rounding hides for |x| up to `reach`."""
    size = scale * np.abs(coefficients) * reach ** np.arange(len(coefficients))
    needed = np.flatnonzero(size > 0.02 * float(jnp.finfo(x.dtype).eps))
    coefficients = coefficients[: max(needed, default=0) + 1]
    out = jnp.full_like(x, float(coefficients[-1]))
    for c in coefficients[-2::-1]:
        out = out * x + float(c)
    return out


def _correction(orders: np.ndarray, eta: Array, cv2: Array) -> Array:
    """A series in the squared coefficient of variation, whose coefficients are series in `eta`."""
    out = jnp.zeros_like(eta * cv2)
    least = _least_shape(eta)
    for k in reversed(range(len(orders) if _is_double(eta) else 3)):
        out = (out + _polynomial(orders[k], eta, _REACH, least ** -(k + 1))) * cv2
    return out


def _excess_near_normal(eta0: Array, cv2: Array) -> Array:
    """x / mean - 1, for a small coefficient of variation."""
    ratio, epsilon, _ = temme_series()
    eta = eta0 + _correction(epsilon, eta0, cv2)
    return eta * _polynomial(ratio, eta, _REACH)


def _eta(excess: Array) -> Array:
    r"""$\eta$ of $\lambda - 1$, without cancellation near zero."""
    ratio = excess / (2.0 + excess)
    small = jnp.abs(excess) < 0.5
    s = jnp.where(small, ratio, 0.0)
    tail = _polynomial(1.0 / np.arange(3.0, 39.0, 2.0), s * s, 1.0 / 9.0)
    near = (1.0 - 2.0 * s * tail / (2.0 + excess)) / (2.0 + excess)
    far = jnp.where(small, 1.0, excess)
    far = (far - jnp.log1p(far)) / far**2
    return excess * jnp.sqrt(2.0 * jnp.where(small, near, far))


def _log_tails(a: Array, y: Array) -> tuple[Array, Array]:
    """Logarithms of the distribution and survival functions at exp(y)."""
    x = jnp.exp(y)
    # P = x^a / Gamma(a + 1) * (1 + sum over k of a / (a + k) * (-x)^k / k!). Its logarithm keeps
    # the digits of 1 - P where P is close to one below x = 1 already, as for the smallest shapes.
    below_one = x < 1.0
    small = jnp.where(below_one, x, 0.0)
    power, more = jnp.ones_like(x), jnp.zeros_like(x)
    for k in range(1, 19 if _is_double(x) else 12):
        power = power * (-small / k)
        more = more + a / (a + k) * power
    safe = jnp.where(below_one, 1.0, x)
    log_cdf = jnp.where(
        below_one, a * y - gammaln(a + 1.0) + jnp.log1p(more), jnp.log(gammainc(a, safe))
    )
    survival = jnp.where(below_one, -jnp.expm1(log_cdf), gammaincc(a, safe))
    return log_cdf, jnp.log(jnp.maximum(survival, 0.0))


def _log_density(a: Array, y: Array) -> Array:
    """The logarithm of the density of y = log x."""
    return a * y - jnp.exp(y) - gammaln(a)


def _drift(a: Array, y: Array) -> Array:
    """dF/da over the density of y: minus the rate at which a quantile's logarithm rises with a."""
    x = jnp.exp(y)
    tiny = x < float(np.sqrt(jnp.finfo(x.dtype).eps))
    body = jax.lax.igamma_grad_a(a, jnp.where(tiny, 1.0, x))
    log_w = _log_density(a, jnp.where(tiny, 0.0, y))
    # P = x^a / Gamma(a + 1) * (1 - a x / (a + 1)) and its density, to first order of x.
    edge = (y - digamma(a + 1.0) - x / (a + 1.0) ** 2) * (1.0 + x / (a + 1.0)) / a
    return jnp.where(tiny, edge, body * jnp.exp(-log_w))


@jax.custom_jvp
def _log_quantile(a: Array, z: Array, wanted: Array) -> Array:
    """The logarithm of the quantile of score `z` and shape `a`, where `wanted`."""
    # The logarithms of both tails are concave in y = log x, so that Newton's method, on the smaller
    # tail, converges from anywhere once its steps are bounded.
    upper = z > 0
    sign = jnp.where(upper, -1.0, 1.0).astype(z.dtype)
    target = log_ndtr(sign * z)
    root_a = jnp.sqrt(a)
    eta0 = jnp.clip(z / root_a, -2.0, 2.0)
    start = (log_ndtr(z) + gammaln(a + 1.0)) / a
    third = jnp.maximum(1.0 - 1.0 / (9.0 * a) + z / (3.0 * root_a), 0.1)
    start = jnp.where(upper & (a > 0.3), jnp.log(a) + 3.0 * jnp.log(third), start)
    normal = (a >= 1.0) & (jnp.abs(z) < 2.0 * root_a)
    excess = _excess_near_normal(eta0, 1.0 / jnp.maximum(a, 1.0))
    start = jnp.where(normal, jnp.log(a * jnp.maximum(1.0 + excess, 1e-30)), start)
    # Rounding moves some by tens of this; and the error after a step is that step's square.
    tolerance = 100.0 * float(jnp.finfo(z.dtype).eps)

    def go_on(state):
        _, active, step = state
        return jnp.any(active) & (step < _MAX_STEPS)

    def advance(state):
        y, active, step = state
        log_cdf, log_survival = _log_tails(a, y)
        log_p = jnp.where(upper, log_survival, log_cdf)
        error = jnp.clip(log_p - target, -1e4, 1e4)
        change = -sign * error * jnp.exp(jnp.clip(log_p - _log_density(a, y), -50.0, 50.0))
        change = jnp.clip(change, jnp.where(upper, -2.0, -jnp.inf), 2.0)
        y = jnp.where(active, y + change, y)
        # A converged element is frozen, so that no element depends on its neighbours.
        active = active & (jnp.abs(change) > tolerance * jnp.maximum(1.0, jnp.abs(y)))
        return y, active, step + 1

    y, _, _ = jax.lax.while_loop(go_on, advance, (start, wanted, 0))
    return y


@_log_quantile.defjvp
def _(primals, tangents):
    (a, z, wanted), (a_dot, z_dot, _) = primals, tangents
    y = _log_quantile(a, z, wanted)
    slope = jnp.exp(jnp.minimum(log_density(z) - _log_density(a, y), 80.0))
    drift = _drift(a, y)
    return y, jnp.where(wanted, slope, 0.0) * z_dot - jnp.where(wanted, drift, 0.0) * a_dot


@jax.custom_jvp
def _score_of_log(a: Array, y: Array) -> Array:
    """The score of exp(y), where it follows the gamma law of shape `a` and scale one."""
    return score_of_tails(*_log_tails(a, y))


@_score_of_log.defjvp
def _(primals, tangents):
    (a, y), (a_dot, y_dot) = primals, tangents
    z = _score_of_log(a, y)
    inside = jnp.abs(z) < 38.0
    slope = _log_density(a, y) - log_density(jnp.where(inside, z, 0.0))
    slope = jnp.exp(jnp.where(inside, slope, -jnp.inf))
    drift = jnp.where(inside, _drift(a, y), 0.0)
    return z, slope * (y_dot + drift * a_dot)


class Gamma(AbstractParametric):
    r"""A gamma latency, parametrised by its mean and coefficient of variation $c$: shape $1 / c^2$.

    For shapes of at least 64 (16 in float32), it is computed from a series around the normal limit,
    which is smooth down to a coefficient of variation of zero. For smaller shapes, it is computed
    by Newton's method on incomplete gamma functions, which costs about a hundred times as much.
    """

    in_files: ClassVar[InFiles] = InFiles("gamma", ("cv",), lambda cv: Gamma(1.0, cv))

    location: Float[Array, "..."] = parameter("finite and at least 0")
    cv: Float[Array, "..."] = parameter("finite and at least 0")

    def __init__(self, location: ArrayLike, cv: ArrayLike):
        """**Arguments:**

        - `location`: the mean, in seconds. Must be non-negative.
        - `cv`: the coefficient of variation, the standard deviation over the mean. Must be
            non-negative; zero gives a constant.
        """
        self.location, self.cv = as_parameters(location, cv)
        check_held("location", location, self.location)

    @staticmethod
    def from_moments(mean: float, variance: float, skewness: float) -> dict[str, float] | None:
        return {"cv": math.sqrt(variance) / mean}

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        cv, z = jnp.broadcast_arrays(self.cv, jnp.asarray(z, self.dtype))
        eta0 = z * cv
        wide = (cv * cv * _least_shape(z) > 1.0) | (jnp.abs(eta0) > _REACH)
        narrow_cv = jnp.where(wide, 0.0, cv)
        ratio = 1.0 + _excess_near_normal(jnp.where(wide, 0.0, eta0), narrow_cv**2)
        wide_cv2 = jnp.where(wide, cv, 1.0) ** 2
        y = _log_quantile(1.0 / wide_cv2, jnp.where(wide, z, 0.0), wide)
        return self.location * jnp.where(wide, wide_cv2 * jnp.exp(y), ratio)

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        x = jnp.asarray(x, self.dtype)
        inside = (x > 0) & (self.location > 0)
        ratio = jnp.where(inside, x, 1.0) / jnp.where(inside, self.location, 1.0)
        cv, ratio, inside = jnp.broadcast_arrays(self.cv, ratio, inside)
        # Near zero, where eta is infinite, the series is not used; its derivative must be finite.
        eta = _eta(jnp.maximum(ratio - 1.0, -0.999))
        wide = (cv * cv * _least_shape(ratio) > 1.0) | (jnp.abs(eta) > _REACH)
        varies = cv > 0
        narrow = jnp.where(wide, 0.0, eta)
        narrow_cv = jnp.where(wide | ~varies, 1.0, cv)
        cv2 = jnp.where(wide, 0.0, cv) ** 2
        eta0 = narrow + _correction(temme_series()[2], narrow, cv2)
        wide = wide & varies
        wide_cv2 = jnp.where(wide, cv, 1.0) ** 2
        far = _score_of_log(1.0 / wide_cv2, jnp.log(jnp.where(wide, ratio, 1.0) / wide_cv2))
        score = jnp.where(wide, far, eta0 / narrow_cv)
        return jnp.where(inside & varies, score, step_score(x - self.location))

    def mean(self) -> Float[Array, "..."]:
        return jnp.broadcast_to(self.location, self.batch_shape)

    def variance(self) -> Float[Array, "..."]:
        return (self.location * self.cv) ** 2

    def third_moment(self) -> Float[Array, "..."]:
        return 2.0 * self.location**3 * self.cv**4


@scale_spread.register(Gamma)
def _(law, factor):
    return eqx.tree_at(lambda gamma: gamma.cv, law, law.cv * factor)
