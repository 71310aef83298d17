import functools as ft
from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ._base import AbstractLatency, InFiles, ParameterRule
from ._lognormal import LogNormal
from ._parameters import as_parameters, broadcast_batch
from ._scores import log_density, log_ndtr, ndtri_exp, score_of_tails


_MAX_STEPS = 120


def _shares(weights: Array) -> list[Array]:
    """The normalised weight of each component."""
    total = jnp.sum(weights, axis=-1)
    return [weights[..., i] / total for i in range(weights.shape[-1])]


def _scores(components: tuple[AbstractLatency, ...], x: Array) -> tuple[list, list]:
    """The score of `x` under each component, and its derivative with respect to `x`."""
    pairs = [jax.jvp(c.to_normal, (x,), (jnp.ones_like(x),)) for c in components]
    return [score for score, _ in pairs], [slope for _, slope in pairs]


def _log_density(score: Array) -> Array:
    """Its logarithm, finite where the score is infinite."""
    return log_density(jnp.clip(score, -1e3, 1e3))


def _largest(shares: list[Array], logs: list[Array]) -> Array:
    """The largest of the components that have a share."""
    values = [jnp.where(w > 0, l, -1e30) for w, l in zip(shares, logs, strict=True)]
    return jax.lax.stop_gradient(ft.reduce(jnp.maximum, values))


def _log_tail(shares: list[Array], scores: list[Array], sign: Array | float) -> Array:
    """The logarithm of the distribution (sign 1) or survival (sign -1) function."""
    logs = [log_ndtr(sign * score) for score in scores]
    top = _largest(shares, logs)
    terms = (w * jnp.exp(jnp.minimum(l - top, 80.0)) for w, l in zip(shares, logs, strict=True))
    return top + jnp.log(sum(terms, jnp.zeros_like(top)))


@eqx.filter_custom_jvp
def _solve(mixture: "Mixture", z: Array) -> Array:
    """The quantile of score `z`, by Newton's method inside a bracket."""
    shares = _shares(mixture.weights)
    # Under each component, the quantile of the mixture lies on one side of the component's own.
    of_components = [c.from_normal(z) for c in mixture.components]
    low, high = ft.reduce(jnp.minimum, of_components), ft.reduce(jnp.maximum, of_components)
    low, high, z, *shares = jnp.broadcast_arrays(low, high, z, *shares)
    sign = jnp.where(z > 0, -1.0, 1.0).astype(z.dtype)
    target = log_ndtr(sign * z)
    eps = float(jnp.finfo(z.dtype).eps)

    def go_on(state):
        *_, active, step = state
        return jnp.any(active) & (step < _MAX_STEPS)

    def advance(state):
        x, low, high, last, active, step = state
        scores, slopes = _scores(mixture.components, x)
        log_p = _log_tail(shares, scores, sign)
        error = sign * (log_p - target)
        density = sum(
            w * jnp.exp(jnp.clip(_log_density(s) - log_p, -80.0, 80.0)) * d
            for w, s, d in zip(shares, scores, slopes, strict=True)
        )
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
        x, low, high, last = (
            jnp.where(active, now, before)
            for now, before in ((new, x), (new_low, low), (new_high, high), (change, last))
        )
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
    shares = _shares(mixture.weights)
    scores, slopes = _scores(mixture.components, x)
    sign = jnp.where(z > 0, -1.0, 1.0).astype(z.dtype)
    # Densities, over the largest of them so that none underflows.
    logs = [
        jnp.where(d > 0, _log_density(s) + jnp.log(jnp.where(d > 0, d, 1.0)), -1e30)
        for s, d in zip(scores, slopes, strict=True)
    ]
    top = _largest(shares, logs)
    dense = top > -1e29
    top = jnp.where(dense, top, 0.0)
    parts = [jnp.exp(jnp.clip(_log_density(s) - top, -1e4, 80.0)) for s in scores]
    density = sum(w * p * d for w, p, d in zip(shares, parts, slopes, strict=True))
    density = jnp.where(dense, density, 1.0)

    def per_density(tangent, weight):
        return jnp.where(dense, weight * tangent / density, 0.0)

    out = atom_dot = atoms = jnp.zeros_like(x)
    if z_dot is not None:
        out = out + per_density(z_dot, jnp.exp(jnp.minimum(log_density(z) - top, 80.0)))
    if mixture_dot.weights is not None:
        share_dots = jax.jvp(_shares, (mixture.weights,), (mixture_dot.weights,))[1]
        for share_dot, score in zip(share_dots, scores, strict=True):
            tail = sign * jnp.exp(jnp.minimum(log_ndtr(sign * score) - top, 80.0))
            out = out - per_density(share_dot, tail)
    probabilities, eps = (
        [jnp.exp(log_ndtr(sign * s)) for s in scores],
        float(jnp.finfo(x.dtype).eps),
    )
    for i, (c, c_dot) in enumerate(zip(mixture.components, mixture_dot.components, strict=True)):
        # A component without spread at this score: the mixture moves along with it.
        own, own_slope = jax.jvp(c.from_normal, (z,), (jnp.ones_like(z),))
        near = jnp.abs(x - own) <= 32.0 * eps * jnp.abs(own)
        hit = (own_slope == 0) & near & (shares[i] > 0)
        atoms = atoms + hit.astype(x.dtype)
        if not jax.tree.leaves(c_dot):
            continue
        _, score_dot = eqx.filter_jvp(lambda c: c.to_normal(x), (c,), (c_dot,))
        if score_dot is not None:
            out = out - jnp.where(slopes[i] > 0, per_density(score_dot, shares[i] * parts[i]), 0.0)
        # The score within the component: what the others leave of the probability.
        elsewhere = sum(
            w * p for j, (w, p) in enumerate(zip(shares, probabilities, strict=True)) if j != i
        )
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
        shares = _shares(self.weights)
        scores = [component.to_normal(x) for component in self.components]
        return score_of_tails(_log_tail(shares, scores, 1.0), _log_tail(shares, scores, -1.0))

    def _mean_of(self, values: list[Array]) -> Array:
        """The mean over the components of a value of each."""
        shares = _shares(self.weights)
        return ft.reduce(jnp.add, [w * x for w, x in zip(shares, values, strict=True)])

    def mean(self) -> Float[Array, "..."]:
        return self._mean_of([c.mean() for c in self.components])

    def variance(self) -> Float[Array, "..."]:
        mean = self.mean()
        return self._mean_of([c.variance() + (c.mean() - mean) ** 2 for c in self.components])

    def third_moment(self) -> Float[Array, "..."]:
        mean = self.mean()
        apart = [(c, c.mean() - mean) for c in self.components]
        return self._mean_of([c.third_moment() + d * (3.0 * c.variance() + d**2) for c, d in apart])

    def rules(self) -> tuple[ParameterRule, ...]:
        def adds_up(weights: np.ndarray) -> np.ndarray:
            good = np.isfinite(weights) & (weights >= 0)
            return good & (np.sum(weights, axis=-1, keepdims=True) > 0)

        allowed = "finite, at least 0, and not all 0"
        return (ParameterRule("weights", self.weights, adds_up, allowed),)
