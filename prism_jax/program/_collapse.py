"""Collapse of the kernels of a block into one latency (mean, standard deviation, skewness).

A block is a row of segments. Within a segment every member of the tensor- and context-parallel
group runs its kernels by itself; then a collective waits for the slowest. Sums add their cumulants.
The maximum is taken under the condition that the slowest GPU of the group has the factor `A`, which
the group's blocks share: one member runs at `A`, the others at factors below it,

    P(max <= x | A) = F(x / A) * (E[F(x / a) | a < A]) ** (n - 1).

Taking `A` outside the maxima instead would count the slowest GPU twice.
"""

import functools as ft
from collections.abc import Mapping, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._misc import FrozenArray
from ..latency import AbstractLatency, cube_normal_score, score_of_maximum


# Standard-normal scores of the slowest GPU's factor at which the moments are computed; between them
# they are interpolated linearly in the factor.
NODE_SCORES = np.linspace(-4.5, 4.5, 19)

# The members below A, by Gauss-Legendre in probability; the law of a segment, on a grid in units of
# its standard deviation.
_BELOW, _BELOW_WEIGHTS = np.polynomial.legendre.leggauss(24)
_BELOW, _BELOW_WEIGHTS = (_BELOW + 1) / 2, _BELOW_WEIGHTS / 2
_GRID = np.linspace(-7.0, 11.0, 181)


class Blocks(eqx.Module):
    """Which kernels make up the ops of each class. Static.

    **Attributes:**

    - `segments`: `(segments, kernels)`, how often each kernel runs in a segment, on each member.
    - `members`: `(segments,)`, how many members run it.
    - `class_segments`: `(classes, segments)`, how often a class contains a segment.
    - `class_collectives`: `(classes, kernels)`, how often it contains a collective.
    - `direct`: `(classes,)`, the kernel of a class that is one kernel and keeps its own law, or -1.
    - `compute`: `(classes,)`, whether the factor of the rank applies to it.
    """

    segments: FrozenArray = eqx.field(static=True)
    members: FrozenArray = eqx.field(static=True)
    class_segments: FrozenArray = eqx.field(static=True)
    class_collectives: FrozenArray = eqx.field(static=True)
    direct: FrozenArray = eqx.field(static=True)
    compute: FrozenArray = eqx.field(static=True)


class Group(eqx.Module):
    """The factors of a group's GPUs: of the slowest, and of the others given the slowest.

    **Attributes:**

    - `slowest`: the factor of the slowest GPU at `NODE_SCORES`.
    - `others`: factors of a GPU below it, at equally likely points.
    """

    slowest: Float[Array, " nodes"]
    others: Float[Array, "nodes below"]


def gpu_factors(
    rank: AbstractLatency | None,
    counts: Sequence[int],
    scores: Float[Array, " scores"],
) -> tuple[list[Group], list[Float[Array, " scores"]]]:
    """The factors of groups of GPUs, whose mean over GPUs is one.

    **Arguments:**

    - `rank`: the law of one GPU's factor; `None` for equal GPUs.
    - `counts`: how many GPUs each group has.
    - `scores`: standard-normal scores.

    **Returns:**

    For each group its factors at the nodes, and that of its slowest GPU at `scores`.
    """
    dtype = scores.dtype
    nodes = jnp.asarray(NODE_SCORES, dtype)
    if rank is None:
        equal = Group(jnp.ones_like(nodes), jnp.ones((len(nodes), len(_BELOW)), dtype))
        return [equal] * len(counts), [jnp.ones_like(scores)] * len(counts)
    wanted = []
    for count in counts:
        # P(one GPU is below the slowest of the group), of which the others have an even share.
        below = jnp.exp(jax.scipy.special.log_ndtr(nodes) / count)
        shares = below[:, None] * jnp.asarray(_BELOW, dtype)[None, :]
        wanted += [
            score_of_maximum(nodes, count),
            jax.scipy.special.ndtri(shares).reshape(-1),
            score_of_maximum(scores, count),
        ]
    # One call for all: a law without a closed quantile is costly to compile.
    factors = rank.from_normal(jnp.concatenate(wanted).astype(rank.dtype)) / rank.mean()
    sizes = np.cumsum([len(scores) for scores in wanted])[:-1]
    parts = jnp.split(factors.astype(dtype), sizes)
    groups = [
        Group(slowest, others.reshape(len(nodes), -1))
        for slowest, others in zip(parts[::3], parts[1::3], strict=True)
    ]
    return groups, parts[2::3]


def segment_maxima(
    mean: Float[Array, ""],
    variance: Float[Array, ""],
    third: Float[Array, ""],
    group: Group,
    count: int,
) -> Float[Array, "3 nodes"]:
    """Mean, variance and third central moment of the slowest of `count` members' segments, given
    the factor of their slowest GPU, at `NODE_SCORES`.

    Differentiable. Source: the module's docstring.
    """
    dtype = mean.dtype
    slowest = group.slowest
    if count == 1:
        return jnp.stack([slowest * mean, slowest**2 * variance, slowest**3 * third])
    std, skewness = _shape(variance, third)
    # A constant segment is treated as one of tiny spread, so that its derivative is right too.
    spread = jnp.maximum(std, 1e-6 * mean)
    grid = jnp.asarray(_GRID, dtype)[None, :]
    # P(a member below A ends before A * (mean + spread * y)), in units of its own spread
    ratio = (slowest[:, None] / group.others)[:, :, None]
    score = (ratio - 1) * (mean / spread) + ratio * grid[None]
    probability = jax.scipy.special.ndtr(cube_normal_score(score, skewness))
    other = jnp.einsum("b,nby->ny", jnp.asarray(_BELOW_WEIGHTS, dtype), probability)
    cdf = jax.scipy.special.ndtr(cube_normal_score(grid, skewness)) * other ** (count - 1)

    def integral(values):
        return jnp.trapezoid(values, dx=dtype.type(_GRID[1] - _GRID[0]), axis=-1)

    # Moments by integrating the survival above a centre and the distribution below it.
    first = grid[0, -1] - integral(cdf)
    above = jnp.maximum(grid - first[:, None], 0)
    beneath = jnp.maximum(first[:, None] - grid, 0)
    second = integral(2 * above * (1 - cdf) + 2 * beneath * cdf)
    skewed = integral(3 * above**2 * (1 - cdf) - 3 * beneath**2 * cdf)
    scale = slowest * std
    return jnp.stack([slowest * mean + scale * first, scale**2 * second, scale**3 * skewed])


def _shape(variance: Float[Array, "*shape"], third: Float[Array, "*shape"]):
    """Standard deviation and skewness; zero, with a derivative, for a constant."""
    constant = variance <= 0
    std = jnp.where(constant, 0, jnp.sqrt(jnp.where(constant, 1, variance)))
    skewness = third / jnp.where(constant, 1, variance) / jnp.where(constant, 1, std)
    return std, jnp.where(constant, 0, skewness)


def segment_skewness(
    blocks: Blocks, cumulants: Float[Array, "3 kernels"]
) -> Float[Array, " segments"]:
    """The skewness of what one member runs in each segment; zero where no other member waits."""
    unit = jnp.max(cumulants[0], initial=1e-30)
    counts = jnp.asarray(blocks.segments.value.T, cumulants.dtype)
    _, skewness = _shape(cumulants[1] / unit**2 @ counts, cumulants[2] / unit**3 @ counts)
    return jnp.where(jnp.asarray(blocks.members.value > 1), skewness, 0)


def class_moments(
    blocks: Blocks,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
    groups: Mapping[int, Group],
) -> Float[Array, "3 classes regimes nodes"]:
    """Mean, standard deviation and skewness of each class, for each regime of the network, given
    the factor of the slowest GPU at `NODE_SCORES`. Differentiable in all that is not static.

    **Arguments:**

    - `blocks`: what the classes are made of.
    - `cumulants`: of each kernel's latency.
    - `network`: the factor on each kernel in each regime.
    - `groups`: the factors of the GPUs of a group, by how many members it has.
    """
    dtype = cumulants.dtype
    # In seconds, cubes of what a kernel varies by would be lost in single precision.
    unit = jax.lax.stop_gradient(jnp.max(cumulants[0]))
    unit = jnp.where(unit > 0, unit, 1)
    cumulants = cumulants / jnp.stack([unit, unit**2, unit**3])[:, None]
    serial = cumulants @ jnp.asarray(blocks.segments.value.T, dtype)
    maxima = [jnp.zeros((3, 0, len(NODE_SCORES)), dtype)]
    order = []
    for count, group in groups.items():
        chosen = np.flatnonzero(blocks.members.value == count)
        order.extend(chosen)
        one = ft.partial(segment_maxima, group=group, count=count)
        maxima.append(jax.vmap(one, out_axes=1)(*serial[:, chosen]))
    slowest = jnp.concatenate(maxima, axis=1)[:, np.argsort(order)]
    compute = jnp.einsum("cs,jsn->jcn", jnp.asarray(blocks.class_segments.value, dtype), slowest)
    powers = jnp.stack([network, network**2, network**3])
    communication = jnp.einsum(
        "ck,jk,jkr->jcr", jnp.asarray(blocks.class_collectives.value, dtype), cumulants, powers
    )
    mean, variance, third = compute[:, :, None, :] + communication[:, :, :, None]
    std, skewness = _shape(variance, third)
    return jnp.stack([mean * unit, std * unit, skewness])
