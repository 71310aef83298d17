"""Segments: the members of a group run independently until the slowest of them has ended.

The maximum is conditional on the factor `A` of the slowest GPU of the group, which the group's
blocks share: one member runs at `A`, the others at lower factors,

    P(max <= x | A) = F(x / A) * (E[F(x / a) | a < A]) ** (n - 1).

Multiplying the maxima by `A` instead would count the slowest GPU twice. The other GPUs also keep
their factors from segment to segment, so a group with slow other GPUs is late in all of them: see
`_kept`.
"""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..host import by_columns
from ..latency import (
    AbstractLatency,
    cube_normal_score,
    moments_of,
    root,
    score_of_maximum,
    shape_of,
)


# Standard-normal scores of the slowest GPU's factor at which the moments are computed; between them
# they are interpolated linearly in the factor.
NODE_SCORES = np.linspace(-4.5, 4.5, 19)


def _shares_below(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of an integral over the probability that a member below `A` is lower
    still: Gauss-Legendre in `s`, where the probability is `1 - s^3 (4 - 3 s)`. So most points are
    just below `A`, where members decide a large group; at the other end, where a quantile is
    infinite, the weights fall to zero.
    """
    points, weights = np.polynomial.legendre.leggauss(number)
    s, weights = (points + 1) / 2, weights / 2
    return 1 - s**3 * (4 - 3 * s), weights * 12 * s**2 * (1 - s)


# The law of a segment is on a grid in units of its standard deviation, and on every other point of
# it where pairs of points are integrated.
_BELOW, _BELOW_WEIGHTS = _shares_below(24)
_GRID = np.linspace(-7.0, 11.0, 73)
_COARSE = 2


class GroupFactors(eqx.Module):
    """The factors of a group's GPUs: of the slowest GPU, and of the others given the slowest.

    **Attributes:**

    - `slowest`: the factor of the slowest GPU at `NODE_SCORES`.
    - `others`: factors of a GPU below it, at the points of `_BELOW`.
    """

    slowest: Float[Array, "*groups nodes"]
    others: Float[Array, "*groups nodes below"]


def gpu_factors(
    rank: AbstractLatency | None,
    counts: Float[Array, " groups"],
    scores: Float[Array, " scores"],
    sizes: Float[Array, " groups"] | None = None,
    lines: Float[Array, " groups"] | None = None,
) -> tuple[GroupFactors, Float[Array, "groups scores"]]:
    """The factors of groups of GPUs, whose mean over GPUs is one.

    **Arguments:**

    - `rank`: the law of one GPU's factor; `None` for equal GPUs.
    - `counts`: how many GPUs each group has.
    - `scores`: standard-normal scores.
    - `sizes`: of how many GPUs, which wait for one another, the others are the slowest; one by
        default.
    - `lines`: over how many GPUs factors are averaged; one by default.

    **Returns:**

    The groups' factors at the nodes, and those of their slowest GPUs at `scores`.
    """
    dtype = scores.dtype
    number = len(counts)
    if rank is None:
        nodes = number, len(NODE_SCORES)
        equal = GroupFactors(jnp.ones(nodes, dtype), jnp.ones((*nodes, len(_BELOW)), dtype))
        return equal, jnp.ones((number, len(scores)), dtype)
    return slowest_and_others(ft.partial(relative_factor, rank), counts, scores, sizes, lines)


def relative_factor(law: AbstractLatency, z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The factor at scores, whose mean is one."""
    return law.from_normal(z.astype(law.dtype)) / law.mean()


def slowest_and_others(
    factor: Callable[[Float[Array, " scores"]], Float[Array, " scores"]],
    counts,
    scores,
    sizes,
    lines,
) -> tuple[GroupFactors, Float[Array, "groups scores"]]:
    """`gpu_factors` from the factor of a GPU at scores."""
    dtype = scores.dtype
    number = len(counts)
    nodes = jnp.broadcast_to(jnp.asarray(NODE_SCORES, dtype), (number, len(NODE_SCORES)))
    count = counts[:, None].astype(dtype)
    # P(one GPU is below the slowest of the group), which the other GPUs share evenly.
    below = jnp.exp(jax.scipy.special.log_ndtr(nodes) / count)
    shares = jnp.asarray(_BELOW, dtype)[None, None, :]
    shares = shares if sizes is None else shares ** (1 / sizes[:, None, None])
    shares = below[:, :, None] * shares
    at = jnp.concatenate([nodes, jnp.broadcast_to(scores, (number, len(scores)))], axis=1)
    scores_below = jax.scipy.special.ndtri(shares).reshape(number, -1)
    # One call for all: a law without a closed quantile is costly to compile.
    together = jnp.concatenate([score_of_maximum(at, count), scores_below], axis=1)
    factors = factor(together.reshape(-1)).reshape(together.shape)
    if lines is not None:
        factors = 1 + (factors - 1) / jnp.sqrt(lines)[:, None]
    places = np.cumsum([nodes.shape[1], len(scores)])
    slowest, at_scores, factors_below = jnp.split(factors.astype(dtype), places, axis=1)
    return GroupFactors(slowest, factors_below.reshape(shares.shape)), at_scores


def segment_maxima(
    mean: Float[Array, "*#nodes"],
    variance: Float[Array, "*#nodes"],
    third: Float[Array, "*#nodes"],
    group: GroupFactors,
    count: Float[Array, ""],
    share: Float[Array, ""] | float = 1.0,
) -> Float[Array, "4 nodes"]:
    """The mean, the variance and the third central moment of the slowest of `count` members'
    segments, given the factor of their slowest GPU, at `NODE_SCORES`; `count` is at least 2. The
    variance is that of the part that each segment draws anew. The last figure is the standard
    deviation that the factors of the other GPUs give to all segments of a sample. If only a `share`
    of the members can decide, these may be any members.

    Differentiable. Source: the module's docstring.
    """
    figures = mean, variance, third, count, jnp.asarray(share, mean.dtype), group.slowest
    return _at_nodes(jnp.column_stack([*jnp.broadcast_arrays(*figures), group.others]).T)


def group_maxima(
    figures: Float[Array, "4 regimes nodes"],
    fixed: Float[Array, "3 regimes"],
    slowest: Float[Array, " nodes"],
    group: GroupFactors,
    count: Float[Array, ""],
) -> tuple[Float[Array, "4 regimes nodes"], Float[Array, "3 regimes"], Float[Array, " regimes"]]:
    """The figures of the slowest of `count` groups of GPUs, from those of each by itself, as of
    `segment_maxima`, given the factor of the `slowest` GPU of all. `fixed` are the cumulants of the
    part of communication, on which factors of GPUs do not act. Returned are also this part, and how
    much of the variance is left.
    """
    middle = figures.shape[-1] // 2

    def of_regime(regime):
        (mean, variance, third, shared), (apart, *_) = regime
        moments = (mean - apart) / slowest, variance / slowest**2, third / slowest**3
        first, second, skewed, kept = segment_maxima(*moments, group, count)
        return jnp.stack([first + apart, second, skewed, root(kept**2 + shared**2)])

    def all_wait(figures):
        regimes = jnp.moveaxis(figures, 1, 0), fixed.T
        return jnp.moveaxis(jax.lax.map(of_regime, regimes), 0, 1)

    maxima = jax.lax.cond(count > 1, all_wait, lambda figures: figures, figures)
    before, after = figures[1, :, middle], maxima[1, :, middle]
    remains = jnp.where(before > 0, after / jnp.where(before > 0, before, 1), 1)
    return maxima, fixed * jnp.stack([jnp.ones_like(remains), remains, remains]), remains


def _at_node(numbers: Float[Array, " numbers"]) -> Float[Array, "4"]:
    """The figures of `segment_maxima` for one factor of the slowest GPU."""
    mean, variance, third, count, share, slowest = numbers[:6]
    factors_below, dtype = numbers[6:], numbers.dtype
    std, skewness = shape_of(variance, third)
    # A constant segment is treated as one of tiny spread, so that its derivative is right too.
    spread = jnp.maximum(std, jnp.maximum(1e-6 * mean, 1e-18))  # Padding has no mean.
    grid = _grid(slowest, factors_below, mean / spread, share)
    # P(a member below A ends after A * (mean + spread * y)), in units of its own spread
    ratio = (slowest / factors_below)[:, None]
    score = (ratio - 1) * (mean / spread) + ratio * grid[None, :]
    later_each = _ndtr(-cube_normal_score(score, skewness))
    later = jnp.asarray(_BELOW_WEIGHTS, dtype) @ later_each
    # By logarithms, because the numbers are nearly one in groups of many members.
    later_any = jnp.minimum(later, 1 - jnp.finfo(dtype).eps)
    deciding = share * count
    none_later = jnp.exp((deciding - 1) * jnp.log1p(-later_any))
    # The slowest GPU is among them, or another member is in its place.
    at_slowest = _ndtr(cube_normal_score(grid, skewness))
    cdf = (share * at_slowest + (1 - share) * (1 - later_any)) * none_later
    step = grid[1] - grid[0]
    first, second, _ = moments_of(grid, cdf, step)
    # Whether the slowest GPU decides is the same in all segments, so it skews none of them.
    _, _, skewed = moments_of(grid, at_slowest * none_later, step)
    scale = slowest * std
    kept = _kept(cdf, at_slowest, later_each, later, deciding, share, step)
    return jnp.stack(
        [
            slowest * mean + scale * first,
            scale**2 * jnp.maximum(second - kept, 0),
            scale**3 * skewed,
            scale * root(kept),
        ]
    )


_at_nodes = by_columns(_at_node)


def _ndtr(z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """That of `jax.scipy`, which also takes `erf` of all scores, in one function."""
    return 0.5 * jax.lax.erfc(-np.sqrt(0.5).astype(z.dtype) * z)


def _grid(slowest, factors_below, means, share) -> Float[Array, " points"]:
    """The grid of ends of a segment, in standard deviations from the mean end on the slowest GPU;
    `means` is the mean in this unit. If that GPU may not decide, other GPUs do.
    """
    grid = jnp.asarray(_GRID, means.dtype)
    before = (1 - jnp.min(factors_below) / slowest) * means
    before = jax.lax.stop_gradient(jnp.where(share < 1, before, 0))
    return grid - before * (grid[-1] - grid) / (grid[-1] - grid[0])


def _kept(cdf, at_slowest, later_each, later, deciding, share, step) -> Float[Array, ""]:
    """The variance that the factors `b` of the others give to a segment's mean, in units of the
    square of its standard deviation: the covariance of two segments that the same GPUs run,

        integral over x, y of E_b[P(max <= x | b) P(max <= y | b)] - P(max <= x) P(max <= y),

    with `P(max <= x | b) = F(x / A) * product of F(x / b_i)`, and the `b_i` independent. Where only
    a share decides, one of these is the slowest GPU or another in both segments alike.
    """
    dtype = cdf.dtype
    cdf, at_slowest, later_each, later = (
        x[..., ::_COARSE] for x in (cdf, at_slowest, later_each, later)
    )
    apart = later_each - later[None, :]
    weighted = apart * jnp.asarray(_BELOW_WEIGHTS, dtype)[:, None]
    covariance = weighted.T @ apart
    below = 1 - jnp.minimum(later, 1 - jnp.finfo(dtype).eps)  # As in `cdf`.
    weight = jnp.outer(cdf, cdf)
    matters = weight > 1e-16  # The squares in derivatives of smaller weights would underflow.

    def relative(covariance, mean):
        product = jnp.where(matters, jnp.outer(mean, mean), 1)
        return jnp.maximum(jnp.where(matters, covariance / product, 0), -0.5)

    gap = at_slowest - below
    of_first = (1 - share) * (covariance + share * jnp.outer(gap, gap))
    # Without differences of nearly equal numbers, for spreads of GPUs far below a segment's.
    excess = (deciding - 1) * jnp.log1p(relative(covariance, below))
    excess += jnp.log1p(relative(of_first, share * at_slowest + (1 - share) * below))
    total = jnp.sum(weight * jnp.expm1(excess))
    return jnp.maximum((_COARSE * step) ** 2 * total, 0)


def mean_factor(group: GroupFactors, count: Float[Array, "*groups"]) -> Float[Array, "*groups"]:
    """The mean factor of all of `count` members, at the middle node."""
    middle = len(NODE_SCORES) // 2
    slowest, factors_below = group.slowest[..., middle], group.others[..., middle, :]
    number = jnp.maximum(count, 1)
    return (
        slowest + (number - 1) * (factors_below @ jnp.asarray(_BELOW_WEIGHTS, factors_below.dtype))
    ) / number


def segment_alone(
    mean, variance, third, group: GroupFactors, count, share
) -> Float[Array, "4 nodes"]:
    """The same for a single member, or for padding."""
    del count, share
    slowest = group.slowest
    moments = [slowest * mean, slowest**2 * variance, slowest**3 * third]
    return jnp.stack([*moments, jnp.zeros_like(slowest)])
