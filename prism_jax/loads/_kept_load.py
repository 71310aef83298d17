r"""The load of the fullest member of an expert-parallel group if popularities are known.

A microbatch sends $N$ tokens by a multinomial law with known popularities. Counts of experts are
approximated by independent Poisson variates. Their sum has the relative variance $1 / N$ and is
nearly independent of their shares, so its effect on the fullest is removed as in `_expert_load`,
and by regression if loads are truncated. The mean is then within 0.3 % of counted tokens, and the
standard deviation within 8 %, or 20 % if nearly all loads are truncated
(`tests/test_kept_popularity.py`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..latency import cube_normal_below, cube_normal_score, log_density, moments_of, root


Moments = Float[Array, "3 *loads"]  # Mean, variance and third central moment.

# The integral over the time of the last end starts where one member has certainly not ended.
_GRID = np.linspace(0.0, 1.0, 401)
_BEFORE, _AFTER = 7.0, 11.0
# The cube of a normal variate approximates a law of a larger skewness badly.
_MOST_SKEWNESS = 2.8


# Of two members, one fuller by `gap` in units of the spread of each, the later ends as late on
# average as the latest of 1 + exp(-1.28 gap) members that are as full: within 0.03 of the spread.
_PER_GAP = 1.28


class Kept(NamedTuple):
    """Loads of each group.

    **Attributes:**

    - `load`: the moments of the load of the fullest member in each microbatch.
    - `member`: the moments of the load of the member that is the fullest on average.
    - `rivals`: how many such members are equivalent to all members, on GPUs that differ.
    - `first`: `(loads, members)`, one for the member that is the fullest on average.
    """

    load: Moments
    member: Moments
    rivals: Float[Array, " loads"]
    first: Float[Array, "loads members"]


def kept_loads(
    shares: Float[Array, "loads members experts"],
    counts: Float[Array, " loads"],
    capacity: Float[Array, " loads"] | None,
    factor: Float[Array, " loads"],
    gpu_spread: Float[Array, ""] | float,
) -> Kept:
    """Moments of the loads of members, given the popularities of experts.

    **Arguments:**

    - `shares`: the share of each expert in the tokens, by member, which add up to one; `nan` for
        padding.
    - `counts`: the tokens of a microbatch, once for each expert that a token goes to.
    - `capacity`: the most tokens that an expert takes, over the mean; `None` for no limit. A
        truncated load is approximated by a normal law.
    - `factor`: the factor on the deviation of loads from one; for `rivals` only.
    - `gpu_spread`: the standard deviation of a GPU's factor over its mean.
    """
    there = ~jnp.isnan(shares)
    number = jnp.sum(there, axis=(1, 2))[:, None, None].astype(shares.dtype)
    share = jnp.where(there, shares, 0)
    tokens = counts[:, None, None]
    experts = jnp.stack(
        [number * share, number**2 * share / tokens, number**3 * share / tokens**2],
    )
    each = jnp.maximum(jnp.sum(there, axis=2), 1).astype(shares.dtype)
    real = jnp.any(there, axis=2)

    def of_members(experts: Float[Array, "3 loads members experts"]):
        total = jnp.sum(jnp.where(there[None], experts, 0), axis=3)
        return total / jnp.stack([each, each**2, each**3])

    laws = members = of_members(experts)
    # The covariance of a member's load with the sum of all loads, over the variance of the sum.
    slopes = laws[0]
    if capacity is not None:
        cut, kept = _cut(experts, capacity[:, None, None])
        members = of_members(cut)
        # A single expert is truncated with the fullest, which is exact.
        laws = jnp.where((each == 1)[None], laws, members)
        slopes = jnp.where(each == 1, slopes, of_members(kept[None] * experts)[0])
    found, slope = _fullest(laws, slopes, real, capacity)
    mean, variance, third = of_fixed_sum(found, 1 / counts, slope)
    # If nearly all is truncated, the rest is rounding.
    varies = variance > 0
    variance = jnp.where(varies, variance, 0)
    most_skewed = _MOST_SKEWNESS * variance**1.5
    third = jnp.where(varies, jnp.clip(third, -most_skewed, most_skewed), 0)
    fullest = jnp.stack([mean, variance, third])
    return Kept(fullest, *_rivals(members, real, factor, gpu_spread))


def _rivals(members: Float[Array, "3 loads members"], real, factor, gpu_spread):
    """The member that is the fullest on average, how many such are equivalent to all, and which
    member it is.
    """
    means = members[0]
    first = jnp.argmax(jnp.where(real, means, -jnp.inf), axis=1)
    member = jnp.take_along_axis(members, first[None, :, None], axis=2)[:, :, 0]
    of_gpu = gpu_spread * (1 + factor * (member[0] - 1))
    spread = root(of_gpu**2 + factor**2 * member[1])
    gap = factor[:, None] * jnp.where(real, member[0][:, None] - means, 0)
    rivals = jnp.exp(-_PER_GAP * jnp.where(gap > 0, gap / jnp.maximum(spread, 1e-9)[:, None], 0))
    number = jnp.sum(jnp.where(real, rivals, 0), axis=1)
    return member, number, jax.nn.one_hot(first, means.shape[1], dtype=means.dtype)


def of_fixed_sum(
    moments: Moments, spread: Float[Array, "*loads"], slope: Float[Array, "*loads"]
) -> Moments:
    """Moments given a sum that is fixed at one, from those if the sum varies: with the mean one,
    the variance `spread`, and the third central moment of a gamma law.

    Exact for a part of the sum, if the parts over the sum are independent of it, as those of gamma
    variates are: its `slope`, the covariance with the sum over `spread`, is its mean. Otherwise the
    variance is what regression leaves, and the third moment is approximated.
    """
    middle, variance, third = moments
    # Divided by the moments of the sum: 1 + spread, and (1 + spread) (1 + 2 spread).
    rest = third - 6 * slope * spread * variance + 4 * slope**3 * spread**2
    return jnp.stack(
        [
            middle,
            (variance - slope**2 * spread) / (1 + spread),
            rest / (1 + spread) / (1 + 2 * spread),
        ]
    )


def _fullest(members: Float[Array, "3 loads members"], slopes, real, most):
    """The moments of the fullest of independent members, each with a mean, a variance and a third
    moment, truncated at `most`; and its slope, as of `of_fixed_sum`, from those of members.
    """
    mean, variance, third = members
    std = jnp.sqrt(jnp.maximum(variance, 1e-12))
    skewness = jnp.clip(third / std**3, -_MOST_SKEWNESS, _MOST_SKEWNESS)
    low = jnp.max(jnp.where(real, mean - _BEFORE * std, -jnp.inf), axis=1)
    high = jnp.max(jnp.where(real, mean + _AFTER * std, -jnp.inf), axis=1)
    if most is not None:
        high = jnp.minimum(high, most)
        low = jnp.minimum(low, high)
    grid = low[:, None] + (high - low)[:, None] * jnp.asarray(_GRID, mean.dtype)[None, :]
    standard = (grid[:, None, :] - mean[:, :, None]) / std[:, :, None]
    # Far from a member the result is constant, and the cube would have huge numbers.
    standard = jnp.clip(standard, -30, 30)
    score = cube_normal_score(standard, skewness[:, :, None])
    below = jax.scipy.special.log_ndtr(score)
    cdf = jnp.exp(jnp.sum(jnp.where(real[:, :, None], below, 0), axis=1))
    step = (high - low) * mean.dtype.type(_GRID[1])
    # A member below the grid has a lower mean, and the sum has by regression.
    lower = jnp.exp(log_density(score) - below) * cube_normal_below(score, skewness[:, :, None])
    lower = jnp.sum(jnp.where(real[:, :, None], (slopes / std)[:, :, None] * lower, 0), axis=1)
    slope = jnp.trapezoid(cdf * lower, axis=-1) * step
    return jnp.stack(moments_of(grid, cdf, step)), slope


def _cut(experts: Float[Array, "3 *shape"], most):
    """The moments of the minimum of `most` and a normal variate, in closed form, and the
    probability that it is less.
    """
    mean, variance, _ = experts
    std = jnp.sqrt(jnp.maximum(variance, 1e-12))
    # Beyond this, all or none is truncated.
    room = jnp.clip((most - mean) / std, -8, 8)
    density = jnp.exp(-0.5 * room**2) / math.sqrt(2 * math.pi)
    rest = jax.scipy.special.ndtr(-room)
    first = room * rest - density
    second = 1 - rest - room * density + room**2 * rest
    third = room**3 * rest - (room**2 + 2) * density
    spread = jnp.where(room > -8, jnp.maximum(second - first**2, 0), 0)
    skewed = jnp.where(room > -8, third - 3 * first * second + 2 * first**3, 0)
    # If nearly all is truncated, the rest is rounding, or more skewed than a cube can be.
    most_skewed = _MOST_SKEWNESS * spread**1.5
    skewed = jnp.clip(skewed, -most_skewed, most_skewed)
    middle = jnp.where(room > -8, mean + std * first, most)
    return jnp.stack([middle, std**2 * spread, std**3 * skewed]), 1 - rest
