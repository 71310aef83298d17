"""Overlapped compute and collectives: the moments of the time when both have ended.

With compute that takes `C` and collectives that take `K`, each slowed while the other runs,

    T = max(K + beta C, C + alpha K)

(`Branches.slowdowns`), where `C` is the compute of the slowest member, because `T` increases with
`C`, and the collectives are one draw for the group. The moments are integrals over the two laws,
each a cube of a normal. The latency that varies less is the outer variable, at equal steps of its
score. The integral over the other is split where both end together, so that each part has a smooth
integrand.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..host import by_columns
from ..latency import cube_normal, cube_normal_score, shape_of
from ..program import Overlaps
from ._sways import of_pieces


_OUTER = np.linspace(-6.0, 6.0, 25)
_OUTER_WEIGHTS = np.exp(-(_OUTER**2) / 2)
_INNER, _INNER_WEIGHTS = np.polynomial.legendre.leggauss(32)
_LIMIT = 7.0  # The largest inner score.
# The least spread in the search for where both end together, as a share of the mean.
_LEAST_SPREAD = 1e-4
_MOST_SKEWNESS = 2.0
_LEAST_VARIED = 1e-10


def branch_moments(
    overlaps: Overlaps,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
    inner: Float[Array, "4 inner #regimes nodes"],
    part: Float[Array, "3 inner #regimes"],
    sways: tuple[Float[Array, "4 inner #regimes"], Float[Array, "2 kernels"]] | None = None,
    *,
    apart: bool = False,
) -> tuple[
    Float[Array, "4 branches regimes nodes"],
    Float[Array, "3 branches regimes"],
    Float[Array, "4 branches regimes"] | None,
    Float[Array, "branches regimes"],
]:
    """When branches have ended after their start. Differentiable with respect to everything except
    indices.

    **Arguments:**

    - `overlaps`: the branches.
    - `cumulants`: the cumulants of each kernel's latency.
    - `network`: the factor on each kernel in each regime.
    - `inner`: the result of `segment_maxima` for each segment, or the same for classes, by regimes.
    - `part`: the part of communication in `inner`.
    - `sways`: how far the inner blocks and the kernels go with loads, as in `_sways`, if there are
        any.
    - `apart`: whether to compute the part of communication as well; zero otherwise.

    **Returns:**

    The cumulants and the shared deviation from other GPUs, as in `segment_maxima`; the part of
    communication in the cumulants at the middle node, that is, their derivative with respect to a
    factor on all communication, over their order; how far the branches go with loads, compute and
    collectives each as far as the mean end goes with their means; and how long the mean compute
    then waits for collectives.
    """
    middle = inner.shape[-1] // 2
    powers = jnp.stack([network, network**2, network**3])
    rows = jnp.einsum("bjk,ik,ikr->bijr", overlaps.communication, cumulants, powers)
    # Up to the end of the compute less up to its start: so the two together are the slowest of the
    # sums of members who do not wait in between.
    compute = jnp.einsum("bs,isrn->birn", overlaps.compute, inner)
    variance = jnp.maximum(compute[:, 1], 0)
    # If it hardly varies, the difference of two third moments is noise: no law is as skewed.
    most = _MOST_SKEWNESS * variance**1.5
    compute = compute.at[:, 1].set(variance).at[:, 2].set(jnp.clip(compute[:, 2], -most, most))
    inside = jnp.einsum("bs,isr->bir", overlaps.compute, part)
    of_loads = None
    if sways is not None:
        of_compute = jnp.einsum("bs,isr->bir", overlaps.compute, sways[0])
        of_compute = jnp.broadcast_to(of_compute, (*of_compute.shape[:2], rows.shape[-1]))
        of_rows = jnp.einsum("bjk,ik,kr->bijr", overlaps.communication, sways[1], network)
        of_loads = of_compute, of_rows

    def of_branch(branch):
        compute, rows, inside, slowdowns, of_loads = branch
        of_compute, of_rows = (None, None) if of_loads is None else of_loads
        communication, sway = rows[:, 0], None if of_rows is None else of_rows[:, 0]
        for j in range(1, rows.shape[1]):
            if of_rows is not None:
                alone = jnp.concatenate([communication, jnp.zeros_like(communication[:1])])
                by_longest, by_row = _everywhere(
                    _slopes, alone, rows[:, j], jnp.zeros_like(slowdowns)
                )
                sway = by_longest[None] * sway + by_row[None] * of_rows[:, j]
            communication = _longest(communication, rows[:, j])
        if apart:
            ends = with_part(compute, communication[:, :, None], inside[:, :, None], slowdowns)
        else:
            ends = together(compute, communication[:, :, None], slowdowns)
            ends = jnp.concatenate([ends, jnp.zeros_like(ends[:3])])
        if of_compute is not None:
            slopes = _everywhere(_slopes, compute[..., middle], communication, slowdowns)
            by_compute, by_communication = slopes
            orders = jnp.stack([by_compute, by_compute, by_compute**2, by_compute**3])
            sway = orders * of_compute + of_pieces(by_communication[None] * sway)
        waits = ends[0, :, middle] - compute[0, :, middle] - slowdowns[0] * communication[0]
        return ends[:4], ends[4:, :, middle], sway, waits

    # One after the other, and computed again for the derivative, because it is large to keep.
    arguments = compute, rows, inside, overlaps.slowdowns, of_loads
    *figures, waits = jax.lax.map(jax.checkpoint(of_branch), arguments)
    ends, parts, sway = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), figures)
    return ends, parts, sway, waits


def together(
    compute: Float[Array, "4 *#shape"],
    communication: Float[Array, "3 *#shape"],
    slowdowns: Float[Array, "2"],
) -> Float[Array, "4 *shape"]:
    """The moments of when compute and communication that start together have both ended.

    **Arguments:**

    - `compute`: the mean, the variance and the third central moment of the part that is drawn anew,
        and the standard deviation of the part that segments share.
    - `communication`: the first three of these.
    - `slowdowns`: `(alpha, beta)`, as in `workload.Branches`.

    **Returns:**

    The same four figures as `compute`. Differentiable with respect to all three arguments.
    """
    return _everywhere(_both_ended, compute, communication, slowdowns)


def with_part(
    compute: Float[Array, "4 *#shape"],
    communication: Float[Array, "3 *#shape"],
    inside: Float[Array, "3 *#shape"],
    slowdowns: Float[Array, "2"],
) -> Float[Array, "7 *shape"]:
    """The figures of `together`, and the part of communication in the first three, where compute
    has a part `inside` that is communication too. As cumulants are homogeneous in all latencies,
    this part is the derivative with respect to a factor on it, over the order.
    """
    return _everywhere(_with_part, compute, communication, inside, slowdowns)


def _everywhere(function, *figures) -> Float[Array, "figures *shape"]:
    """A function of columns of figures, applied at each place of arrays of them."""
    shape = jnp.broadcast_shapes(*(x.shape[1:] for x in figures))
    rows = []
    for x in figures:
        x = x.reshape(len(x), *[1] * (len(shape) + 1 - x.ndim), *x.shape[1:])
        rows.append(jnp.broadcast_to(x, (len(x), *shape)).reshape(len(x), -1))
    return function(jnp.concatenate(rows)).reshape(-1, *shape)


@by_columns
def _with_part(numbers: Float[Array, "12"]) -> Float[Array, "7"]:
    compute, communication, inside, slowdowns = jnp.split(numbers, np.array([4, 7, 10]))
    orders = jnp.arange(1, 4, dtype=numbers.dtype)
    none = jnp.zeros_like(numbers[:1])
    grows = jnp.concatenate([orders * inside, none, orders * communication, none, none])
    figures = jnp.concatenate([compute, communication, slowdowns])
    ends, grows = jax.jvp(_ended, (figures,), (grows,))
    return jnp.concatenate([ends, grows[:3] / orders])


def _ended(numbers: Float[Array, "9"]) -> Float[Array, "4"]:
    """The figures of `together` for one compute and one communication."""
    mean_c, own, third, shared, mean_k, variance_k, third_k, alpha, beta = numbers
    variance_c = own + shared**2
    # The cube of a smaller number would underflow, and division by it fail.
    variance_c = jnp.where(variance_c > (_LEAST_VARIED * mean_c) ** 2, variance_c, 0)
    std_c, skewness_c = shape_of(variance_c, third)
    weights, late_c, late_k = _quadrature(
        (mean_c, std_c, skewness_c, 1 - beta),
        (mean_k, *shape_of(variance_k, third_k), 1 - alpha),
    )
    by_compute, by_communication = mean_c + alpha * mean_k, mean_k + beta * mean_c
    constant = jnp.maximum(by_compute, by_communication)
    # Deviations from the constant end, because single precision resolves small numbers better.
    late = jnp.maximum(
        _wide(by_compute - constant) + late_c + _wide(alpha) * late_k,
        _wide(by_communication - constant) + late_k + _wide(beta) * late_c,
    )

    def mean(x):
        return jnp.sum(weights * x, axis=(-2, -1))

    first = mean(late)
    apart = late - _wide(first)
    # The slope on compute times its shared part. Both are divided by the standard deviation, for
    # the variance is small, and derivatives divide by its square.
    inverse = jnp.where(std_c > 0, 1 / jnp.where(std_c > 0, std_c, 1), 0)
    shares = mean(apart * (_wide(inverse) * late_c)) * (inverse * shared)
    variance = jnp.maximum(mean(apart**2) - shares**2, 0)
    return jnp.stack([constant + first, variance, mean(apart**3), shares])


_both_ended = by_columns(_ended)


@by_columns
def _slopes(numbers: Float[Array, "9"]) -> Float[Array, "2"]:
    """By how much the mean end grows with the mean compute, and with the mean communication."""
    along = np.eye(9, dtype=numbers.dtype)[[0, 4]]
    return jnp.stack([jax.jvp(_ended, (numbers,), (jnp.asarray(x),))[1][0] for x in along])


def _longest(
    first: Float[Array, "3 *shape"], second: Float[Array, "3 *shape"]
) -> Float[Array, "3 *shape"]:
    """The cumulants of the longer of two latencies that do not slow each other."""
    alone = jnp.concatenate([first, jnp.zeros_like(first[:1])])
    return together(alone, second, jnp.zeros((2,), first.dtype))[:3]


def _quadrature(figures, figures_2):
    """Weights, and the deviation of each of two from its mean, `(*shape, outer, inner)`. They end
    together where the sum of mean and deviation, times the last figure of each, is equal.
    """
    mean, std, skewness, part = figures
    mean_2, std_2, skewness_2, part_2 = figures_2
    dtype = std.dtype
    lead = (1,) * std.ndim

    def constants(values, *axes):
        return jnp.asarray(values, dtype).reshape(*lead, *axes)

    outer = constants(_OUTER, -1, 1)
    first_varies_more = part * std >= part_2 * std_2

    def pick(if_first, if_second):
        return _wide(jnp.where(first_varies_more, if_first, if_second))

    ahead = part_2 * mean_2 - part * mean
    ahead = pick(ahead, -ahead)
    narrow = pick(std_2, std) * cube_normal(outer, pick(skewness_2, skewness))
    spread = jnp.maximum(pick(part * std, part_2 * std_2), _LEAST_SPREAD * pick(mean, mean_2))
    meets = (ahead + pick(part_2, part) * narrow) / jnp.maximum(spread, 1e-12)
    meets = jnp.clip(cube_normal_score(meets, pick(skewness, skewness_2)), -_LIMIT, _LIMIT)
    # Two parts, below and above: one axis for the parts, and one for the points of each.
    half_lengths = jnp.stack([meets + _LIMIT, _LIMIT - meets], axis=-1) / 2
    middle = jnp.stack([meets - _LIMIT, _LIMIT + meets], axis=-1) / 2
    inner = middle + half_lengths * constants(_INNER, 1, -1, 1)
    weights = half_lengths * constants(_INNER_WEIGHTS, 1, -1, 1) * jnp.exp(-(inner**2) / 2)
    weights = weights * constants(_OUTER_WEIGHTS, -1, 1, 1)
    inner = inner.reshape(*inner.shape[:-2], -1)
    weights = weights.reshape(inner.shape)
    weights = weights / jnp.sum(weights, axis=(-2, -1), keepdims=True)
    wide = pick(std, std_2) * cube_normal(inner, pick(skewness, skewness_2))
    narrow = jnp.broadcast_to(narrow, wide.shape)
    first = first_varies_more[..., None, None]
    return weights, jnp.where(first, wide, narrow), jnp.where(first, narrow, wide)


def _wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape 1 1"]:
    return x[..., None, None]
