r"""Loads of an expert-parallel group whose experts have a capacity, several experts a member.

Experts have the loads $1 + \beta (g_i / \bar g - 1)$ of `_expert_load`, with independent gamma
variates $g_i$ of mean one. Each load is truncated, and a member has the mean over its experts. The
gamma variates given $\bar g = 1$ are those with any $\bar g$ for which it happens to be one, and
with any $\bar g$ members are independent (Levin, 1981, for counts). So the law of the fullest is

$$P(\max_m l_m \le x \mid \bar g = 1) \propto
    \int \left(E[e^{i t (\bar g_m - 1) / n}; l_m \le x]\right)^n dt,$$

where $\bar g_m$ is the mean over a member's experts. The expectation is that of a sum over these
experts, so its Fourier transform in $x$ is a power of that of one expert. Both transforms are
inverted by sums, and the law is one at $x = \infty$.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from ..latency import moments_of, normal_nodes


# The grid of loads from that many deviations below to above the mean, and its margins in steps.
_BELOW, _ABOVE = 7.0, 12.0
_POINTS, _MARGIN = 512, 4
# Loads are smoothed by about a step, because truncated loads have a law with jumps.
_ORDERS = np.fft.fftfreq(_POINTS, 1 / _POINTS)
_SMOOTH = np.exp(-0.5 * (6 * _ORDERS / _POINTS) ** 2)
# The frequencies of the sum over experts. The last ones fade so flatly that moments stay.
_SUMS = np.arange(32)
_FADE = np.exp(-36 * (_SUMS / len(_SUMS)) ** 8) * np.where(_SUMS > 0, 1, 0.5)
# For a smaller concentration, which is taken for this one, these frequencies are too few.
_LEAST_CONCENTRATION = 1.0
_TINY = 1e-12


def cv_of_expert(
    concentration: Float[Array, " loads"],
    members: Float[Array, " loads"],
    experts: Float[Array, " loads"],
) -> Float[Array, " loads"]:
    """The standard deviation of the gamma variate of an expert."""
    return jnp.sqrt(members * experts / jnp.maximum(concentration, _LEAST_CONCENTRATION))


def cut_loads(
    more: Float[Array, "loads nodes"],
    concentration: Float[Array, " loads"],
    stretch: Float[Array, " loads"],
    members: Float[Array, " loads"],
    experts: Float[Array, " loads"],
    capacity: Float[Array, " loads"],
) -> tuple[Float[Array, "3 loads"], Float[Array, "3 loads"]]:
    r"""Moments of the load of the fullest member, and of a member whose independent copies differ
    as much as members do. Of a member that has all experts, both are those of its load.

    **Arguments:**

    - `more`: the gamma variate of an expert minus one, at `normal_nodes`.
    - `concentration`, `stretch`: $c'$ and $\beta$.
    - `members`, `experts`, `capacity`: as in `Loads`.
    """
    concentration = jnp.maximum(concentration, _LEAST_CONCENTRATION)
    weights = jnp.asarray(normal_nodes(more.dtype)[1], more.dtype)
    member = _member(more, weights, concentration, stretch, members * experts, experts, capacity)

    # One by one, and again for the derivative, because of the many frequencies.
    laws = (more, concentration, stretch, members, experts, capacity)
    fullest = jax.checkpoint(lambda law: _fullest(weights, *law))
    return jnp.where(members > 1, jax.lax.map(fullest, laws).T, member), member


def _member(more, weights, concentration, stretch, number, experts, capacity):
    """The mean load of an expert, given the sum, is that by a beta law. The truncated loads of two
    experts covary by their parts in proportion to loads before truncation, whose sum is fixed.
    """
    # The ratio of the densities of the beta law and the gamma law, over that at the mean.
    part = more / (number - 1)[:, None]
    inside = part < 1
    part = jnp.where(inside, part, 0)
    others = (concentration * (1 - 1 / number) - 1)[:, None]
    density = weights[None, :] * jnp.exp(others * (jnp.log1p(-part) + part) + part)
    ratio = jnp.where(inside, density, 0)
    ratio = ratio / jnp.sum(ratio, axis=1, keepdims=True)

    def expected(values):
        return jnp.sum(ratio * values, axis=1)

    whole = stretch[:, None] * more
    load = jnp.minimum(whole, capacity[:, None] - 1)
    mean = expected(load)
    apart = load - mean[:, None]
    slope = expected(apart * whole) / expected(whole**2)
    variance = expected(apart**2) + slope**2 * expected(whole**2) / (number - 1)
    # If there is no other member, all that varies is what truncation takes.
    alone = number == experts
    rest = apart - slope[:, None] * whole
    variance = jnp.where(alone, expected(rest**2), variance)
    third = expected(jnp.where(alone[:, None], rest, apart) ** 3)
    return jnp.stack([1 + mean, variance / experts, third / experts**2])


def _fullest(weights, more, concentration, stretch, members, experts, capacity):
    """Moments of the fullest load of one group; see the docstring of the module."""
    load = stretch * more
    each = jnp.minimum(load, capacity - 1)
    mean = jnp.sum(weights * each)
    std = jnp.sqrt(jnp.sum(weights * (each - mean) ** 2) / experts)
    low = jnp.maximum(-stretch, mean - _BELOW * std)
    high = jnp.minimum(capacity - 1, mean + _ABOVE * std)
    step = (high - low) / (_POINTS - 2 * _MARGIN)
    low = low - _MARGIN * step

    def rotated(angles: Float[Array, "..."]) -> Complex[Array, "..."]:
        return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))

    # The mean of gamma variates repeats itself with this period, far above all likely means.
    period = 10 / jnp.sqrt(concentration) + 20 / concentration
    orders, sums = jnp.asarray(_ORDERS, more.dtype), jnp.asarray(_SUMS, more.dtype)
    of_load = 2 * math.pi / (_POINTS * step) * orders
    of_sum = 2 * math.pi / period * sums
    loads = rotated(-of_load[:, None] * ((each - low) / experts)[None, :])
    gammas = rotated(of_sum[None, :] * (more / (members * experts))[:, None])
    gammas = gammas * weights[:, None].astype(gammas.dtype)
    full = jnp.where(load[:, None] < capacity - 1, 0, gammas)
    rows = jnp.concatenate([loads @ gammas, jnp.sum(full, axis=0, keepdims=True)])
    rows = _power(rows, experts)
    # Members whose experts are all full have a load of their own, which a grid would smear.
    part = rows[:-1] - rotated(-of_load * (high - low))[:, None] * rows[-1:]
    smooth = jnp.asarray(_SMOOTH, part.dtype)[:, None]
    below = jnp.cumsum(jnp.fft.ifft(part * smooth, axis=0), axis=0)
    rows = _power(jnp.concatenate([below, rows[:1]]), members)
    cdf = jnp.real(rows) @ jnp.asarray(_FADE, more.dtype)
    # A point of the grid stands for what is within half a step.
    grid = low + step * (jnp.arange(_POINTS, dtype=more.dtype) + 0.5)
    cdf = jnp.where(grid < high, jnp.clip(cdf[:-1] / cdf[-1], 0, 1), 1)
    first, variance, third = moments_of(grid, cdf, step)
    return jnp.stack([1 + first, variance, third])


def _power(base: Complex[Array, "..."], exponent: Float[Array, ""]) -> Complex[Array, "..."]:
    """A whole power."""
    base = jnp.where(jnp.abs(base) > _TINY, base, _TINY)
    return jnp.exp(exponent.astype(base.dtype) * jnp.log(base))
