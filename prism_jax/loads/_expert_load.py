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

import functools as ft
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..host import on_host
from ..latency import Gamma, cube_normal, normal_nodes, score_of_maximum, shape_of
from ._cut_load import cut_loads, cv_of_expert
from ._kept_load import Moments, kept_loads, of_fixed_sum


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

    - `members`: $n$; one that has all experts, of which some are truncated.
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
    fullest load of members of one expert, whose law is approximated by `ThreeMoment`. For several
    experts, which are truncated separately, see `_cut_load`: from a concentration of 10, the mean
    is within 0.3 % and the standard deviation within 5 %, mostly 1 %, of counted tokens
    (`tests/test_expert_load.py`). Down to 1 they are within 6 % and 20 %.
    """
    factor, rivals, first, kept = unevenness.spread, loads.members, None, None
    if loads.shares is not None:
        kept = kept_loads(loads.shares, loads.counts, loads.capacity, factor, gpu_spread)
        known = ~jnp.isnan(loads.shares[:, 0, 0])
        rivals, first = jnp.where(known, kept.rivals, rivals), kept.first
    # One call for both, because it is costly to compile.
    numbers = jnp.concatenate([loads.members, rivals * loads.split])
    scores = score_of_maximum(_scores(numbers.dtype), numbers[None, :])
    of_members, of_ranks = jnp.split(scores, 2, axis=1)
    load, member = _drawn_anew(loads, unevenness.concentration, of_members)
    if kept is not None:
        load = jnp.where(known[None, :], kept.load, load)
        member = jnp.where(known[None, :], kept.member, member)
    powers = jnp.stack([factor, factor**2, factor**3])

    def spread(moments: Moments) -> Moments:
        return (moments.at[0].add(-1) * powers).at[0].add(1)

    # Less the fullest of independent members.
    correction = (load - _of_one(member, of_ranks)) * powers
    return Fullest(spread(load), spread(member), correction, rivals / loads.members, first)


@ft.cache  # Layouts have loads in common.
def mean_of_fullest(
    concentration: float,
    members: int,
    counts: int,
    experts: int,
    capacity: float,
    popularity: tuple[float, ...] = (),
) -> float:
    """The mean load of the fullest member, as a number.

    **Arguments:**

    - `concentration`, `members`, `counts`, `experts`: as in `Unevenness` and `Loads`.
    - `capacity`: the same; infinite for no limit.
    - `popularity`: of each expert, member by member, if it is known; only proportions matter.
    """

    def array(number: float) -> Float[Array, "1"]:
        return jnp.asarray([float(number)])

    limit = array(capacity) if math.isfinite(capacity) else None
    shares = None
    if popularity:
        known = np.array(popularity, float).reshape(1, members, experts)
        shares = jnp.asarray(known / known.sum(), jnp.result_type(float))
    # How many ranks share the load of a member does not change it.
    sizes = array(members), array(counts), array(experts), array(1)
    uneven = Unevenness(array(concentration), array(1.0))
    return float(on_host(fullest, Loads(*sizes, limit, shares), uneven).load[0, 0])


def _drawn_anew(loads: Loads, concentration, scores) -> tuple[Moments, Moments]:
    """The fullest load and that of a member, if popularities are drawn for each microbatch."""
    concentration, stretch = _matched(loads.counts, concentration)
    cv = jnp.sqrt(loads.members / concentration)
    if loads.capacity is not None:
        # One call for both, because the quantile of a gamma law is costly to compile.
        of_one = jnp.broadcast_to(_scores(scores.dtype), scores.shape)
        scores = jnp.concatenate([scores, of_one], axis=1)
        cv = jnp.concatenate([cv, cv_of_expert(concentration, loads.members, loads.experts)])
    most, *each = jnp.split(Gamma(1.0, cv).from_normal(scores) - 1, len(cv) // len(stretch), axis=1)
    load = _fullest_uncut(most, concentration, stretch)
    shape = jnp.maximum(concentration / loads.members, _LEAST_SHAPE)
    member = jnp.stack([jnp.ones_like(shape), stretch**2 / shape, 2 * stretch**3 / shape**2])
    if loads.capacity is not None:
        sizes = (loads.members, loads.experts, loads.capacity)
        fullest_cut, cut = cut_loads(each[0].T, concentration, stretch, *sizes)
        limited = jnp.isfinite(loads.capacity)
        one = _of_one(load, _scores(load.dtype), loads.capacity)
        load = jnp.where(limited & (loads.experts > 1), fullest_cut, one)
        member = jnp.where(limited, cut, member)
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


def _fullest_uncut(most, concentration, stretch) -> Moments:
    """From the largest of as many gamma variates as members, minus their mean, at `_scores`."""
    mean, variance, third = _moments(most)
    moments = jnp.stack([1 + mean, variance, third])
    found = of_fixed_sum(moments, 1 / concentration, 1 + mean)
    powers = jnp.stack([stretch, stretch**2, stretch**3])
    return (found.at[0].set(mean) * powers).at[0].add(1)


def _of_one(load: Moments, scores, most=None) -> Moments:
    """The moments of a load whose normal score is each of `scores` at `_scores`, truncated at
    `most` if that is given.
    """
    std, skewness = shape_of(load[1], load[2])
    apart = std[None, :] * cube_normal(scores, skewness[None, :])
    if most is not None:
        apart = jnp.minimum(apart, (most - load[0])[None, :])
    mean, *rest = _moments(apart)
    return jnp.stack([load[0] + mean, *rest])


def _scores(dtype) -> Float[Array, "nodes 1"]:
    return jnp.asarray(normal_nodes(dtype)[0][:, None], dtype)


def _moments(values: Float[Array, "nodes loads"]) -> list[Float[Array, " loads"]]:
    """The mean, the variance and the third central moment of values at `_scores`."""
    weights = jnp.asarray(normal_nodes(values.dtype)[1], values.dtype)
    mean = weights @ values
    apart = values - mean[None, :]
    return [mean, weights @ apart**2, weights @ apart**3]
