r"""The load of the fullest member of an expert-parallel group.

The popularities of the experts are $p \sim \mathrm{Dirichlet}(c\, p_0)$ with even $p_0$; a
microbatch sends $N$ tokens, each counted once for every expert that it goes to, by a multinomial
law. A member of $n$ holds an even share of the experts, so the counts of members are multinomial
with popularities of $\mathrm{Dirichlet}(c / n, \dots, c / n)$. The load of a member is its count
over the mean, $N / n$.

Loads are replaced by $1 + \beta (n q - 1)$ with $q \sim \mathrm{Dirichlet}(c' / n, \dots)$. Their
sum is right, and $c'$ and $\beta$ match the variance and the skewness of a count: this is exact
without the noise of the multinomial law, and matches three moments if there is only this noise. The
shares $q$ are $g_i / S$ with independent gamma variates $g_i$ and their sum $S$. They are
independent of $S$ (Basu, 1955), so that

$$E[\max_i g_i^k] = E[S^k]\, E[\max_i q_i^k],$$

and the left side is an integral over one variable.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..latency import Gamma, cube_normal, expectation, score_of_maximum
from ._kept_load import Moments, kept_loads, of_fixed_sum
from ._segment import shape_of


# The cube of a normal variate approximates a gamma law of a smaller shape badly.
_LEAST_SHAPE = 0.5


class Unevenness(eqx.Module):
    """The parameters of laws of loads, one entry for each.

    **Attributes:**

    - `concentration`: $c$, positive; infinite if all experts are equally popular.
    - `spread`: a factor on the deviation of loads from one.
    """

    concentration: Float[Array, " loads"]
    spread: Float[Array, " loads"]


class Loads(eqx.Module):
    """Laws of the loads of expert-parallel groups, without their parameters; one entry for each.

    **Attributes:**

    - `members`: $n$, at least 2.
    - `counts`: $N$, the tokens of a microbatch.
    - `experts`: how many experts a member has.
    - `split`: how many ranks share a member's experts and load.
    - `capacity`: the most tokens that an expert takes, over the mean, at least 1; further tokens
        are dropped. `None` for no limit.
    - `shares`: the share of each expert in the tokens, by member, if these are known and constant;
        the concentration is then not used. `nan` if unknown, and for padding. `None` if none are
        known.
    """

    members: Float[Array, " loads"]
    counts: Float[Array, " loads"]
    experts: Float[Array, " loads"]
    split: Float[Array, " loads"]
    capacity: Float[Array, " loads"] | None
    shares: Float[Array, "loads most_members most_experts"] | None = None


class Fullest(eqx.Module):
    """The fullest member of each group, and equivalent independent ranks.

    **Attributes:**

    - `load`: the moments of the load of the fullest member.
    - `member`: the moments of the load of one of the independent ranks, by the law of
        `ThreeMoment`.
    - `correction`: `load` minus the moments of the fullest of the independent ranks.
    - `share`: the share of the group's ranks that the independent ranks represent: below one if it
        is known which member has most.
    - `first`: `(loads, members)`, one for the member that has most; `None` if it is never known.
    """

    load: Moments
    member: Moments
    correction: Moments
    share: Float[Array, " loads"]
    first: Float[Array, "loads most_members"] | None


def fullest(
    loads: Loads, unevenness: Unevenness, gpu_spread: Float[Array, ""] | float = 0.0
) -> Fullest:
    """Moments of the load of the fullest member. The mean load over members is one unless tokens
    are dropped. Differentiable with respect to the concentration, the spread and the capacity. For
    known shares, see `kept_loads`.

    Without a capacity, it is as exact as the docstring of the module says. A capacity truncates the
    fullest load, whose law is approximated by `ThreeMoment`. If a member has several experts, which
    are truncated separately, the fullest load changes as much as that of independent members, which
    is accurate to 2 % of the mean.
    """
    load, member = _drawn_anew(loads, unevenness.concentration)
    factor, rivals, first = unevenness.spread, loads.members, None
    if loads.shares is not None:
        kept = kept_loads(loads.shares, loads.counts, loads.capacity, factor, gpu_spread)
        known = ~jnp.isnan(loads.shares[:, 0, 0])
        load = jnp.where(known[None, :], kept.load, load)
        member = jnp.where(known[None, :], kept.member, member)
        rivals, first = jnp.where(known, kept.rivals, rivals), kept.first
    powers = jnp.stack([factor, factor**2, factor**3])

    def spread(moments: Moments) -> Moments:
        return (moments.at[0].add(-1) * powers).at[0].add(1)

    correction = (load - _independent(member, rivals * loads.split)) * powers
    return Fullest(spread(load), spread(member), correction, rivals / loads.members, first)


def _drawn_anew(loads: Loads, concentration) -> tuple[Moments, Moments]:
    """The fullest load and that of a member, if popularities are drawn for each microbatch."""
    concentration, stretch = _matched(loads.counts, concentration)
    shape = jnp.maximum(concentration / loads.members, _LEAST_SHAPE)
    ones = jnp.ones_like(shape)
    load = _fullest_uncut(concentration, stretch, loads.members)
    member = jnp.stack([ones, stretch**2 / shape, 2 * stretch**3 / shape**2])
    if loads.capacity is not None:
        cut = _member(shape / loads.experts, stretch, loads.experts, loads.capacity)
        several = load + _independent(cut, loads.members) - _independent(member, loads.members)
        load = jnp.where(loads.experts > 1, several, _cut(load, loads.capacity))
        member = cut
    return load, member


def _matched(number, concentration) -> tuple[Float[Array, " loads"], Float[Array, " loads"]]:
    r"""$c'$ and $\beta$. The variance and the third central moment of the share of any member are
    those of a share that is zero or one, multiplied by numbers that do not depend on the member.
    """
    spread = 1 / concentration
    variance = (number * spread + 1) / (number * (spread + 1))
    third = (1 + 2 * number * spread) * variance / (number * (1 + 2 * spread))
    half = third / (2 * variance**1.5)  # sqrt(c' + 1) / (c' + 2)
    root = (1 + jnp.sqrt(1 - 4 * half**2)) / (2 * half)
    return root**2 - 1, jnp.sqrt(variance) * root


def _fullest_uncut(concentration, stretch, members) -> Moments:
    cv = jnp.sqrt(members / concentration)
    mean, variance, third = _moments(
        lambda z: Gamma(1.0, cv).from_normal(score_of_maximum(z, members)) - 1, cv
    )
    found = of_fixed_sum(jnp.stack([1 + mean, variance, third]), 1 / concentration)
    powers = jnp.stack([stretch, stretch**2, stretch**3])
    return (found.at[0].set(mean) * powers).at[0].add(1)


def _member(shape, stretch, experts, capacity) -> Moments:
    """The mean over independent experts, whose loads are truncated separately."""
    law = Gamma(1.0, 1 / jnp.sqrt(shape))
    mean, variance, third = _moments(
        lambda z: jnp.minimum(stretch * (law.from_normal(z) - 1), capacity - 1), shape
    )
    return jnp.stack([1 + mean, variance / experts, third / experts**2])


def _independent(member: Moments, members) -> Moments:
    """The fullest of independent members."""
    std, skewness = shape_of(member[1], member[2])
    mean, *rest = _moments(lambda z: std * cube_normal(score_of_maximum(z, members), skewness), std)
    return jnp.stack([member[0] + mean, *rest])


def _cut(load: Moments, most) -> Moments:
    """The moments of a load that is truncated at `most`."""
    (std, skewness), room = shape_of(load[1], load[2]), most - load[0]
    mean, *rest = _moments(lambda z: jnp.minimum(std * cube_normal(z, skewness), room), std)
    return jnp.stack([load[0] + mean, *rest])


def _moments(at_score, like) -> list[Float[Array, " loads"]]:
    """The mean, the variance and the third central moment of a function of a normal score."""

    def powers(z):
        x = at_score(jnp.broadcast_to(z, like.shape))
        return jnp.stack([x, x**2, x**3])

    mean, second, third = expectation(powers, like.dtype)
    return [mean, second - mean**2, third - 3 * mean * second + 2 * mean**3]
