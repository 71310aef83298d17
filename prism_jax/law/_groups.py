"""Standard errors of the figures of a law, by leaving groups of replica samples out.

The jackknife of groups: how far a figure moves without a group is what the group adds to it. Two
corrections are needed. Steps of equal rank look at different samples, so the time that a step has
without a group scatters by its pick: this is subtracted. And steps have draws of their own (factor,
reductions, tail), which no group holds: their scatter is added. Both are sums over pairs of steps
that are next to each other in rank. A step that looked at no other group is left out with its
group, and its own draws with it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from .._estimate import Scatter, scatter
from ._counted import AnyArray
from ._errors import Errors, errors_of_figures


# Of 32 contributions, skewness is known poorly; beyond this Hall's transformation has no bound.
_MOST_SKEWNESS = 0.3


class GroupSums(NamedTuple):
    """Sums over steps. Those of pools add up.

    **Attributes:**

    - `decided`, `without`: of the steps that each group decided, and of these without it:
        `(groups, 3)`, their number, and the sums of deviations from a centre and of their squares;
        and `(groups, thresholds + 1)`, how many are between each two thresholds.
    - `picks`: by how much the differences between these two scatter among steps of equal rank:
        `(2, 2)` for the sums of deviations and squares, and `(thresholds,)` for how many are below.
    - `own`: the same of steps themselves.
    """

    decided: tuple[AnyArray, AnyArray]
    without: tuple[AnyArray, AnyArray]
    picks: tuple[AnyArray, AnyArray]
    own: tuple[AnyArray, AnyArray]


def group_sums(
    times: Float[AnyArray, " steps"],
    without: Float[AnyArray, " steps"],
    group: Int[AnyArray, " steps"],
    slowest: Int[AnyArray, " steps"],
    centre: Float[ArrayLike, ""],
    thresholds: Float[AnyArray, " thresholds"],
    num_groups: int,
    *,
    xp: Any,
) -> GroupSums:
    """The sums over steps, whose ranks ascend.

    **Arguments:**

    - `times`, `without`: in seconds; the second is `nan` for a step that looked at no other group.
    - `group`: that decided each step; those of `num_groups` or more are no steps.
    - `slowest`: equal for steps of equal rank.
    - `centre`: about the mean.
    - `xp`: `numpy` or `jax.numpy`, by which this is computed.
    """
    there, other = group < num_groups, (group < num_groups) & ~xp.isnan(without)
    both = xp.stack([times, xp.where(other, without, 0)])
    kinds = len(thresholds) + 1
    bucket = xp.searchsorted(xp.asarray(thresholds), both.reshape(-1)).reshape(both.shape)
    deviation = both - centre
    powers = xp.stack([deviation, deviation**2], axis=-1)

    def total(place, weight, length):
        if xp is np:
            return np.bincount(place, weight, length)
        return jnp.zeros(length, weight.dtype).at[place].add(weight, mode="drop")

    def by_group(of, there):
        kept = xp.where(there, group, num_groups)
        one = there.astype(powers.dtype)
        weights = [one, *(one[None] * powers[of].T)]
        moments = xp.stack([total(kept, w, num_groups + 1)[:-1] for w in weights], axis=1)
        counts = total(kept * kinds + bucket[of], one, (num_groups + 1) * kinds)
        return moments, counts.reshape(-1, kinds)[:-1]

    def of_pairs(x):
        even = len(x) // 2 * 2
        return x[:even:2], x[1:even:2]

    def between(low, high, weight):
        """For each threshold, the weight of pairs of which it is between the two."""
        weight = ((low < high) & weight).astype(powers.dtype)
        changes = total(low, weight, kinds + 1) - total(high, weight, kinds + 1)
        return xp.cumsum(changes)[:-2]

    def products(x, weight):
        return xp.einsum("ia,ib,i->ab", x, x, weight.astype(powers.dtype))

    others, groups, ranks = (of_pairs(x) for x in (other, group, slowest))
    pairs = others[0] & others[1]
    same_rank = pairs & (ranks[0] == ranks[1])
    same_group = same_rank & (groups[0] == groups[1])
    (high, low), (first, second) = bucket, of_pairs(powers[0])
    (low_1, low_2), (high_1, high_2) = of_pairs(low), of_pairs(high)
    lost_1, lost_2 = of_pairs(powers[0] - powers[1])
    # (a - b)^2 where both are of a group, else a^2 + b^2.
    apart = same_rank & ~same_group
    picks = (
        products(lost_1 - lost_2, same_group) + products(lost_1, apart) + products(lost_2, apart)
    )
    counts = between(low_1, high_1, same_rank) + between(low_2, high_2, same_rank)
    shared = between(xp.maximum(low_1, low_2), xp.minimum(high_1, high_2), same_group)
    crossed = between(xp.minimum(high_1, high_2), xp.maximum(high_1, high_2), pairs)
    return GroupSums(
        by_group(0, there),
        by_group(1, other),
        (picks, counts - 2 * shared),
        (products(first - second, pairs), crossed),
    )


def errors_by_group(sums: GroupSums, num_groups: int) -> Errors:
    """The errors of a law: of its mean, its standard deviation, and the share of steps up to each
    threshold, which are those at `LEVELS`. The groups of `sums` are `num_groups` for each regime of
    the network: how many steps are in a regime is set, so it does not scatter.
    """
    arrays: Any = [[np.asarray(x, np.float64) for x in part] for part in sums]
    (moments, counts), (less, fewer), picks, own = arrays
    decided = np.concatenate([moments, np.cumsum(counts, axis=1)[:, :-1]], axis=1)
    without = np.concatenate([less, np.cumsum(fewer, axis=1)[:, :-1]], axis=1)
    decided, without = (x.reshape(-1, num_groups, x.shape[1]) for x in (decided, without))
    total = decided.sum(axis=1, keepdims=True)
    # Steps that looked at no other group are replaced by the average step of their regime.
    missing = decided[..., :1] - without[..., :1]
    left = total - decided + without + missing * total / np.maximum(total[..., :1], 1)
    left, decided = left.sum(axis=0), decided.sum(axis=0)
    total, number = decided.sum(axis=0), decided[:, 0].sum()

    def figures(x):
        shift, square = x[:, 1] / number, x[:, 2] / number
        return np.column_stack(
            [shift, np.sqrt(np.maximum(square - shift**2, 0)), x[:, 3:] / number]
        )

    apart = figures(left)
    apart = (apart.mean(axis=0) - apart) * np.sqrt(num_groups / (num_groups - 1))
    shift, std = figures(total[None])[0, :2]
    slope = np.array([-shift, 0.5]) / std if std else np.zeros(2)  # Of the standard deviation.
    by_picks, by_own = (
        np.concatenate([[products[0, 0], slope @ products @ slope], counted]) / number**2
        for products, counted in (picks, own)
    )
    scatters = [_scatter(*column) for column in zip(apart.T, by_picks, by_own, strict=True)]
    sides = np.array([decided[:, 3:], decided[:, :1] - decided[:, 3:]])
    # A group holds a pair of samples at least; but few steps look at only some of its samples.
    of_all = np.minimum(2 * (decided[:, 0] > 0).sum(), number)
    of_side = np.minimum(2 * (sides > 0).sum(axis=1), sides.sum(axis=1)).min(axis=0)
    return errors_of_figures(scatters, of_all, of_side)


def _scatter(apart: np.ndarray, by_picks: float, by_own: float) -> Scatter:
    """The scatter of a figure, from what each group adds to it."""
    by_groups = scatter(*(float(np.sum(apart**power)) for power in (2, 3, 4)))
    square = by_groups.error**2
    variance = max(square - by_picks, square / 4) + by_own
    if variance <= 0:
        return Scatter(0.0)
    skewness = by_groups.skewness * (square / variance) ** 1.5
    # The more of the scatter few groups hold, the less is known of it.
    known = min(by_groups.degrees, len(apart) - 1)
    degrees = known * (variance / square) ** 2 if square else float("inf")
    return Scatter(variance**0.5, min(max(skewness, -_MOST_SKEWNESS), _MOST_SKEWNESS), degrees)
