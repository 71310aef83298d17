"""Collapse of the kernels of a block into one latency (mean, standard deviation, skewness).

A block is a row of segments. Within a segment every member of the tensor- and context-parallel
group runs its kernels by itself; then a collective waits for the slowest. Sums add their cumulants.
The maximum is taken under the condition that the slowest GPU of the group has the factor `A`, which
the group's blocks share: one member runs at `A`, the others at factors below it,

    P(max <= x | A) = F(x / A) * (E[F(x / a) | a < A]) ** (n - 1).

Taking `A` outside the maxima instead would count the slowest GPU twice. The others keep their
factors from segment to segment too, so a group whose others are slow is late in all of them: see
`_kept`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._misc import FrozenArray
from ..latency import AbstractLatency, cube_normal_score, score_of_maximum


# Standard-normal scores of the slowest GPU's factor at which the moments are computed; between them
# they are interpolated linearly in the factor.
NODE_SCORES = np.linspace(-4.5, 4.5, 19)

# The members below A, by Gauss-Legendre in probability; the law of a segment, on a grid in units of
# its standard deviation, and on every fourth point of it where pairs of points are integrated.
_BELOW, _BELOW_WEIGHTS = np.polynomial.legendre.leggauss(24)
_BELOW, _BELOW_WEIGHTS = (_BELOW + 1) / 2, _BELOW_WEIGHTS / 2
_GRID = np.linspace(-7.0, 11.0, 181)
_COARSE = 4


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


class Collapse(eqx.Module):
    """What of `Blocks` the collapse needs, as arrays, padded with zeros.

    **Attributes:**

    - `segments`, `class_segments`, `class_collectives`: as of `Blocks`.
    - `members`: `(segments,)`, how many members run each.
    - `group`: `(segments,)`, which group of GPUs they are.
    """

    segments: Float[Array, "segments kernels"]
    class_segments: Float[Array, "classes segments"]
    class_collectives: Float[Array, "classes kernels"]
    members: Float[Array, " segments"]
    group: Int[Array, " segments"]


class Group(eqx.Module):
    """The factors of a group's GPUs: of the slowest, and of the others given the slowest.

    **Attributes:**

    - `slowest`: the factor of the slowest GPU at `NODE_SCORES`.
    - `others`: factors of a GPU below it, at equally likely points.
    """

    slowest: Float[Array, "*groups nodes"]
    others: Float[Array, "*groups nodes below"]


def gpu_factors(
    rank: AbstractLatency | None,
    counts: Float[Array, " groups"],
    scores: Float[Array, " scores"],
) -> tuple[Group, Float[Array, "groups scores"]]:
    """The factors of groups of GPUs, whose mean over GPUs is one.

    **Arguments:**

    - `rank`: the law of one GPU's factor; `None` for equal GPUs.
    - `counts`: how many GPUs each group has.
    - `scores`: standard-normal scores.

    **Returns:**

    The groups' factors at the nodes, and those of their slowest GPUs at `scores`.
    """
    dtype = scores.dtype
    number = len(counts)
    nodes = jnp.broadcast_to(jnp.asarray(NODE_SCORES, dtype), (number, len(NODE_SCORES)))
    if rank is None:
        equal = Group(jnp.ones_like(nodes), jnp.ones((*nodes.shape, len(_BELOW)), dtype))
        return equal, jnp.ones((number, len(scores)), dtype)
    count = counts[:, None].astype(dtype)
    # P(one GPU is below the slowest of the group), of which the others have an even share.
    below = jnp.exp(jax.scipy.special.log_ndtr(nodes) / count)
    shares = below[:, :, None] * jnp.asarray(_BELOW, dtype)[None, None, :]
    wanted = (
        score_of_maximum(nodes, count),
        jax.scipy.special.ndtri(shares).reshape(number, -1),
        score_of_maximum(jnp.broadcast_to(scores, (number, len(scores))), count),
    )
    # One call for all: a law without a closed quantile is costly to compile.
    together = jnp.concatenate(wanted, axis=1).astype(rank.dtype)
    factors = rank.from_normal(together.reshape(-1)).reshape(together.shape) / rank.mean()
    sizes = np.cumsum([part.shape[1] for part in wanted])[:-1]
    slowest, others, at_scores = jnp.split(factors.astype(dtype), sizes, axis=1)
    return Group(slowest, others.reshape(shares.shape)), at_scores


def segment_maxima(
    mean: Float[Array, ""],
    variance: Float[Array, ""],
    third: Float[Array, ""],
    group: Group,
    count: Float[Array, ""],
) -> Float[Array, "4 nodes"]:
    """Mean, variance and third central moment of the slowest of `count` members' segments, given
    the factor of their slowest GPU, at `NODE_SCORES`; `count` is at least 2. The variance is of
    what each segment draws anew; last comes the standard deviation of what the other GPUs' factors
    make of all segments of a sample.

    Differentiable. Source: the module's docstring.
    """
    dtype = mean.dtype
    slowest = group.slowest
    std, skewness = _shape(variance, third)
    # A constant segment is treated as one of tiny spread, so that its derivative is right too.
    spread = jnp.maximum(std, jnp.maximum(1e-6 * mean, 1e-12))  # Padding has no mean.
    grid = jnp.asarray(_GRID, dtype)[None, :]
    # P(a member below A ends after A * (mean + spread * y)), in units of its own spread
    ratio = (slowest[:, None] / group.others)[:, :, None]
    score = (ratio - 1) * (mean / spread) + ratio * grid[None]
    later_each = jax.scipy.special.ndtr(-cube_normal_score(score, skewness))
    later = jnp.einsum("b,nby->ny", jnp.asarray(_BELOW_WEIGHTS, dtype), later_each)
    # By the logarithm of what is nearly one, for groups of many members.
    others = jnp.exp((count - 1) * jnp.log1p(-jnp.minimum(later, 1 - jnp.finfo(dtype).eps)))
    cdf = jax.scipy.special.ndtr(cube_normal_score(grid, skewness)) * others

    def integral(values):
        return jnp.trapezoid(values, dx=dtype.type(_GRID[1] - _GRID[0]), axis=-1)

    # Moments by integrating the survival above a centre and the distribution below it.
    first = grid[0, -1] - integral(cdf)
    above = jnp.maximum(grid - first[:, None], 0)
    beneath = jnp.maximum(first[:, None] - grid, 0)
    second = integral(2 * above * (1 - cdf) + 2 * beneath * cdf)
    skewed = integral(3 * above**2 * (1 - cdf) - 3 * beneath**2 * cdf)
    scale = slowest * std
    kept = _kept(cdf, later_each, later, count)
    return jnp.stack(
        [
            slowest * mean + scale * first,
            scale**2 * jnp.maximum(second - kept, 0),
            scale**3 * skewed,
            scale * _root(kept),
        ]
    )


def _kept(cdf, later_each, later, count) -> Float[Array, " nodes"]:
    """The variance that the factors `b` of the others give to a segment's mean, in units of the
    square of its standard deviation: the covariance of two segments that the same GPUs run,

        integral over x, y of E_b[P(max <= x | b) P(max <= y | b)] - P(max <= x) P(max <= y),

    with `P(max <= x | b) = F(x / A) * product of F(x / b_i)`, and the `b_i` independent.
    """
    dtype = cdf.dtype
    cdf, later_each, later = (x[..., ::_COARSE] for x in (cdf, later_each, later))
    apart = later_each - later[:, None]
    weighted = apart * jnp.asarray(_BELOW_WEIGHTS, dtype)[None, :, None]
    covariance = jnp.einsum("nbx,nby->nxy", weighted, apart)
    below = 1 - jnp.minimum(later, 1 - jnp.finfo(dtype).eps)  # As in `cdf`.
    weight = cdf[:, :, None] * cdf[:, None, :]
    matters = weight > 1e-20
    product = jnp.where(matters, below[:, :, None] * below[:, None, :], 1)
    relative = jnp.maximum(jnp.where(matters, covariance / product, 0), -0.5)
    # Without differences of what is nearly equal, for spreads of GPUs far below a segment's.
    excess = weight * jnp.expm1((count - 1) * jnp.log1p(relative))
    step = dtype.type(_COARSE * (_GRID[1] - _GRID[0]))
    return jnp.maximum(step**2 * jnp.sum(excess, axis=(1, 2)), 0)


def _segment_alone(mean, variance, third, group: Group, count) -> Float[Array, "4 nodes"]:
    """The same of one member, or of padding."""
    del count
    slowest = group.slowest
    moments = [slowest * mean, slowest**2 * variance, slowest**3 * third]
    return jnp.stack([*moments, jnp.zeros_like(slowest)])


def _root(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The square root; zero, with a derivative, of zero."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def _shape(variance: Float[Array, "*shape"], third: Float[Array, "*shape"]):
    """Standard deviation and skewness; zero, with a derivative, for a constant."""
    constant, std = variance <= 0, _root(variance)
    skewness = third / jnp.where(constant, 1, variance) / jnp.where(constant, 1, std)
    return std, jnp.where(constant, 0, skewness)


def segment_skewness(
    collapse: Collapse, cumulants: Float[Array, "3 kernels"]
) -> Float[Array, " segments"]:
    """The skewness of what one member runs in each segment; zero where no other member waits."""
    unit = jnp.max(cumulants[0], initial=1e-30)
    counts = collapse.segments.T
    _, skewness = _shape(cumulants[1] / unit**2 @ counts, cumulants[2] / unit**3 @ counts)
    return jnp.where(collapse.members > 1, skewness, 0)


def class_moments(
    collapse: Collapse,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
    groups: Group,
) -> tuple[Float[Array, "3 classes regimes nodes"], Float[Array, "classes nodes"]]:
    """Mean, standard deviation and skewness of each class, for each regime of the network, given
    the factor of the slowest GPU at `NODE_SCORES`, of what each op draws anew; and the standard
    deviation of what all ops of a rank share in a sample, for its other GPUs are the same ones.
    Segments share it fully, also those of unlike spreads, whose correlation is a little below one.
    Differentiable in all that is not an index.

    **Arguments:**

    - `collapse`: what the classes are made of.
    - `cumulants`: of each kernel's latency.
    - `network`: the factor on each kernel in each regime.
    - `groups`: the factors of the GPUs of each group.
    """
    unit, cumulants = _in_units(cumulants)
    serial = cumulants @ collapse.segments.T
    mine = jax.tree.map(lambda x: x[collapse.group], groups)

    def one(segment):
        moments, group, count = segment
        # Most rows are padding: a loop with a branch, not `vmap`, which would compute both.
        return jax.lax.cond(count > 1, segment_maxima, _segment_alone, *moments, group, count)

    # Computed again for the derivative: kept for all rows, it would take longer to write.
    one = jax.checkpoint(one)
    slowest = jnp.moveaxis(jax.lax.map(one, (serial.T, mine, collapse.members)), 0, 1)
    *compute, shared = jnp.einsum("cs,jsn->jcn", collapse.class_segments, slowest)
    compute = jnp.stack(compute)
    communication = _communication(collapse, cumulants, network)
    mean, variance, third = compute[:, :, None, :] + communication[:, :, :, None]
    std, skewness = _shape(variance, third)
    return jnp.stack([mean * unit, std * unit, skewness]), shared * unit


def communication_moments(
    collapse: Collapse,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
) -> Float[Array, "3 classes regimes"]:
    """What `class_moments` gives for the communication of each class alone, which no GPU slows."""
    unit, cumulants = _in_units(cumulants)
    mean, variance, third = _communication(collapse, cumulants, network)
    std, skewness = _shape(variance, third)
    return jnp.stack([mean * unit, std * unit, skewness])


def _in_units(cumulants: Float[Array, "3 kernels"]):
    """A unit of time, and the cumulants in it: in seconds, cubes of what a kernel varies by would
    be lost in single precision.
    """
    unit = jax.lax.stop_gradient(jnp.max(cumulants[0]))
    unit = jnp.where(unit > 0, unit, 1)
    return unit, cumulants / jnp.stack([unit, unit**2, unit**3])[:, None]


def _communication(collapse: Collapse, cumulants, network) -> Float[Array, "3 classes regimes"]:
    """The cumulants of the collectives of each class."""
    powers = jnp.stack([network, network**2, network**3])
    return jnp.einsum("ck,jk,jkr->jcr", collapse.class_collectives, cumulants, powers)
