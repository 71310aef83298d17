from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency, InFiles, ParameterRule, as_parameters, broadcast_batch
from ._lognormal import LogNormal
from ._scores import log_density, log_ndtr, ndtri_exp, score_of_tails


_MAX_STEPS = 120


def _shares(weights: Array, shape: tuple[int, ...]) -> Float[Array, "components ..."]:
    """The normalised weight of each component, in a batch of this shape."""
    shares = jnp.moveaxis(weights / jnp.sum(weights, axis=-1, keepdims=True), -1, 0)
    lead = (1,) * (1 + len(shape) - shares.ndim)
    shares = shares.reshape(len(shares), *lead, *shares.shape[1:])
    return jnp.broadcast_to(shares, (len(shares), *shape))


def _scores(components: tuple[AbstractLatency, ...], x: Array) -> tuple[Array, Array]:
    """The score of `x` under each component, and its derivative with respect to `x`."""
    pairs = [jax.jvp(c.to_normal, (x,), (jnp.ones_like(x),)) for c in components]
    scores, slopes = map(jnp.stack, zip(*pairs, strict=True))
    return scores, slopes


def _log_density(scores: Array) -> Array:
    """Its logarithm, finite where the score is infinite."""
    return log_density(jnp.clip(scores, -1e3, 1e3))


def _largest(shares: Array, logs: Array) -> Array:
    """The largest of the components that have a share."""
    return jax.lax.stop_gradient(jnp.max(jnp.where(shares > 0, logs, -1e30), axis=0))


def _log_tail(shares: Array, scores: Array, sign: Array | float) -> Array:
    """The logarithm of the distribution (sign 1) or survival (sign -1) function."""
    logs = log_ndtr(sign * scores)
    top = _largest(shares, logs)
    return top + jnp.log(jnp.sum(shares * jnp.exp(jnp.minimum(logs - top[None], 80.0)), axis=0))


@eqx.filter_custom_jvp
def _solve(mixture: "Mixture", z: Array) -> Array:
    """The quantile of score `z`, by Newton's method inside a bracket."""
    shares = _shares(mixture.weights, z.shape)
    # Under each component, the quantile of the mixture lies on one side of the component's own.
    of_components = jnp.stack([c.from_normal(z) for c in mixture.components])
    low, high = jnp.min(of_components, axis=0), jnp.max(of_components, axis=0)
    sign = jnp.where(z > 0, -1.0, 1.0).astype(z.dtype)
    target = log_ndtr(sign * z)
    eps = float(jnp.finfo(z.dtype).eps)

    def go_on(state):
        *_, active, step = state
        return jnp.any(active) & (step < _MAX_STEPS)

    def advance(state):
        x, low, high, last, active, step = state
        scores, slopes = _scores(mixture.components, x)
        log_p = _log_tail(shares, scores, sign[None])
        error = sign * (log_p - target)
        heights = jnp.exp(jnp.clip(_log_density(scores) - log_p[None], -80.0, 80.0))
        density = jnp.sum(shares * heights * slopes, axis=0)
        new_low = jnp.where(error < 0, x, low)
        new_high = jnp.where(error < 0, high, x)
        rising = density > 0
        newton = x - error / jnp.where(rising, density, 1.0)
        # A Newton step that does not halve the one before gives way to bisection.
        use = rising & (newton >= new_low) & (newton <= new_high)
        use = use & (jnp.abs(newton - x) <= 0.5 * last)
        new = jnp.where(use, newton, 0.5 * (new_low + new_high))
        change = jnp.abs(new - x)
        # A converged element is frozen, so that no element depends on its neighbours.
        now, before = jnp.stack([new, new_low, new_high, change]), jnp.stack([x, low, high, last])
        x, low, high, last = jnp.where(active[None], now, before)
        active = active & (change > 2.0 * eps * jnp.abs(new)) & (error != 0)
        return x, low, high, last, active, step + 1

    active = high - low > 2.0 * eps * jnp.abs(high)
    start = 0.5 * (low + high)
    x, *_ = jax.lax.while_loop(go_on, advance, (start, low, high, high - low, active, 0))
    return x


@_solve.def_jvp
def _(primals, tangents):
    (mixture, z), (mixture_dot, z_dot) = primals, tangents
    x = _solve(mixture, z)
    shares = _shares(mixture.weights, z.shape)
    scores, slopes = _scores(mixture.components, x)
    sign = jnp.where(z > 0, -1.0, 1.0).astype(z.dtype)
    log_tails, log_heights = log_ndtr(sign[None] * scores), _log_density(scores)
    # Densities, over the largest of them so that none underflows.
    rising = slopes > 0
    top = _largest(
        shares, jnp.where(rising, log_heights + jnp.log(jnp.where(rising, slopes, 1.0)), -1e30)
    )
    dense = top > -1e29
    top = jnp.where(dense, top, 0.0)
    heights = jnp.exp(jnp.clip(log_heights - top[None], -1e4, 80.0))
    density = jnp.where(dense, jnp.sum(shares * heights * slopes, axis=0), 1.0)

    def per_density(tangent, weight):
        return jnp.where(dense, weight * tangent / density, 0.0)

    out = atom_dot = atoms = jnp.zeros_like(x)
    if z_dot is not None:
        out = out + per_density(z_dot, jnp.exp(jnp.minimum(log_density(z) - top, 80.0)))
    if mixture_dot.weights is not None:
        share_dots = jax.jvp(
            lambda weights: _shares(weights, z.shape), (mixture.weights,), (mixture_dot.weights,)
        )[1]
        for share_dot, log_tail in zip(share_dots, log_tails, strict=True):
            out = out - per_density(share_dot, sign * jnp.exp(jnp.minimum(log_tail - top, 80.0)))
    taken, eps = shares * jnp.exp(log_tails), float(jnp.finfo(x.dtype).eps)
    for i, (c, c_dot) in enumerate(zip(mixture.components, mixture_dot.components, strict=True)):
        # A component without spread at this score: the mixture moves along with it.
        of_component, own_slope = jax.jvp(c.from_normal, (z,), (jnp.ones_like(z),))
        is_near = jnp.abs(x - of_component) <= 32.0 * eps * jnp.abs(of_component)
        hit = (own_slope == 0) & is_near & (shares[i] > 0)
        atoms = atoms + hit.astype(x.dtype)
        if not jax.tree.leaves(c_dot):
            continue
        _, score_dot = eqx.filter_jvp(lambda c: c.to_normal(x), (c,), (c_dot,))
        if score_dot is not None:
            change = per_density(score_dot, shares[i] * heights[i])
            out = out - jnp.where(rising[i], change, 0.0)
        # The score within the component: what the others leave of the probability.
        elsewhere = jnp.sum(taken.at[i].set(0.0), axis=0)
        left = (jnp.exp(log_ndtr(sign * z)) - elsewhere) / jnp.where(shares[i] > 0, shares[i], 1.0)
        within = sign * ndtri_exp(jnp.log(jnp.clip(left, eps, 1.0 - eps)))
        _, own_dot = eqx.filter_jvp(lambda c, z=within: c.from_normal(z), (c,), (c_dot,))
        if own_dot is not None:
            atom_dot = atom_dot + jnp.where(hit, own_dot, 0.0)
    return x, jnp.where(atoms > 0, atom_dot / jnp.maximum(atoms, 1.0), out)


def _slow_mixture(sigma: float, slow_weight: float, slow_factor: float) -> "Mixture":
    """A log-normal of median one that is `slow_factor` times as long with probability
    `slow_weight`.
    """
    if not 0 <= slow_weight <= 1:
        raise ValueError(
            f"`lognormal-mixture` got `slow_weight={slow_weight}`; it must be between 0 and 1."
        )
    body, slow = LogNormal(1.0, sigma), LogNormal(slow_factor, sigma)
    return Mixture([1.0 - slow_weight, slow_weight], (body, slow))


class Mixture(AbstractLatency):
    r"""A latency that follows one of several laws, chosen at random: $F = w_1 F_1 + w_2 F_2 + ...$

    Its quantile has no closed form. It is found by Newton's method, between the quantiles of the
    components, and differentiated implicitly. Components may have zero variance.
    """

    in_files: ClassVar[InFiles] = InFiles(
        "lognormal-mixture", ("sigma", "slow_weight", "slow_factor"), _slow_mixture
    )

    weights: Float[Array, "... components"]
    components: tuple[AbstractLatency, ...]

    def __init__(
        self, weights: ArrayLike | Sequence[float], components: tuple[AbstractLatency, ...]
    ):
        """**Arguments:**

        - `weights`: the weight of each component, along the trailing axis; they need not sum to
            one. The axes before it are batch axes.
        - `components`: the laws of the components. Their batches broadcast.
        """
        like = [np.zeros((), component.dtype) for component in components]
        self.weights = as_parameters(weights, *like)[0]
        self.components = tuple(components)

    def __check_init__(self) -> None:
        if not self.components or self.weights.shape[-1:] != (len(self.components),):
            raise ValueError(
                f"`Mixture` got weights of shape {self.weights.shape} for {len(self.components)} "
                "components; the trailing axis must have one weight for each, and at least one."
            )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast_batch(
            self.weights.shape[:-1], *(component.batch_shape for component in self.components)
        )

    def from_normal(self, z: ArrayLike) -> Float[Array, "..."]:
        z = jnp.asarray(z, self.dtype)
        return _solve(self, jnp.broadcast_to(z, broadcast_batch(z.shape, self.batch_shape)))

    def to_normal(self, x: ArrayLike) -> Float[Array, "..."]:
        scores = jnp.stack(jnp.broadcast_arrays(*[c.to_normal(x) for c in self.components]))
        shares = _shares(self.weights, broadcast_batch(self.weights.shape[:-1], scores.shape[1:]))
        scores = jnp.broadcast_to(scores, shares.shape)
        return score_of_tails(_log_tail(shares, scores, 1.0), _log_tail(shares, scores, -1.0))

    def _moments(self) -> tuple[Array, ...]:
        """The share of each component, its mean, how far this is above that of the mixture, its
        variance and its third central moment.
        """
        shape = self.batch_shape
        rows = [(c.mean(), c.variance(), c.third_moment()) for c in self.components]
        mean, variance, third = (
            jnp.stack([jnp.broadcast_to(x, shape) for x in xs]) for xs in zip(*rows, strict=True)
        )
        shares = _shares(self.weights, shape)
        return shares, mean, mean - jnp.sum(shares * mean, axis=0)[None], variance, third

    def mean(self) -> Float[Array, "..."]:
        shares, mean, *_ = self._moments()
        return jnp.sum(shares * mean, axis=0)

    def variance(self) -> Float[Array, "..."]:
        shares, _, apart, variance, _ = self._moments()
        return jnp.sum(shares * (variance + apart**2), axis=0)

    def third_moment(self) -> Float[Array, "..."]:
        shares, _, apart, variance, third = self._moments()
        return jnp.sum(shares * (third + apart * (3.0 * variance + apart**2)), axis=0)

    def rules(self) -> tuple[ParameterRule, ...]:
        def adds_up(weights: np.ndarray) -> np.ndarray:
            good = np.isfinite(weights) & (weights >= 0)
            return good & (np.sum(weights, axis=-1, keepdims=True) > 0)

        allowed = "finite, at least 0, and not all 0"
        return (ParameterRule("weights", self.weights, adds_up, allowed),)
