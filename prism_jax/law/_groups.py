"""Standard errors of the figures of a law, by groups of replica samples.

What a group adds to a figure is how the figure moves with the weight of its samples: the sum, over
the steps that they decide, of a function of the step minus the same of the step without the sample
that decides it. Which replica comes next is a draw, and a step has draws of its own (factor,
reductions, tail), which no group holds. So the second is the mean over a block of steps next to
each other in rank: the scatter of the next replica averages out, and the step's own draws stay in
the first. If all steps of a block are one group's, their own draws cancel, and are added by sets of
steps instead, one of each block. If a group has the share `s` of a block, `s^2` of them cancel.
"""

import functools as ft
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from .._padding import AnyArray
from ._errors import Errors, errors_of_figures, scatters


# Of 32 contributions, skewness is known poorly; beyond this Hall's transformation has no bound.
_MOST_SKEWNESS = 0.3


class GroupSums(NamedTuple):
    """Sums over steps, for each regime of the network and each group: of weights, of deviations
    from a centre, of the squares of these, and of how many steps are below each threshold.

    **Attributes:**

    - `decided`: over the steps that each group decided.
    - `moved`: by how much sums over all steps move with the weight of the group's samples, if a
        weight that is left is that of the mean of the regime.
    """

    decided: Float[AnyArray, "regimes groups thresholds+3"]
    moved: Float[AnyArray, "regimes groups thresholds+3"]


def group_sums(
    times: Float[AnyArray, " steps"],
    without: Float[AnyArray, " steps"] | None,
    group: Int[AnyArray, " steps"],
    centre: Float[ArrayLike, ""],
    thresholds: Float[AnyArray, " thresholds"],
    shape: tuple[int, int],
    *,
    xp: Any,
) -> GroupSums:
    """The sums over steps, whose ranks ascend.

    **Arguments:**

    - `times`, `without`: in seconds; the second is `None` if steps have one replica.
    - `group`: that decided each step, counted through the regimes.
    - `centre`: about the mean.
    - `shape`: the number of regimes, and that of groups in each.
    - `xp`: `numpy` or `jax.numpy`, by which this is computed.
    """
    (regimes, groups), kinds, thresholds = shape, len(thresholds) + 1, xp.asarray(thresholds)

    def total(place, weight, length):
        if xp is np:
            return np.bincount(place, weight, length)
        return jnp.zeros(length, weight.dtype).at[place].add(weight)

    def bins(steps):
        return steps - centre, xp.searchsorted(thresholds, steps)

    def sums(steps, weight, place, length):
        deviation, below = steps
        moments = [total(place, weight * deviation**power, length) for power in range(3)]
        counts = total(place * kinds + below, weight, length * kinds).reshape(length, kinds)
        return xp.concatenate([xp.stack(moments, 1), xp.cumsum(counts, 1)[:, :-1]], axis=1)

    of_times = bins(times)
    decided = sums(of_times, xp.ones_like(times), group, regimes * groups)
    if without is None:
        decided = decided.reshape(regimes, groups, -1)
        return GroupSums(decided, decided)
    step, blocks = xp.arange(len(times), dtype=group.dtype), -(-len(times) // groups) * regimes
    block = step // groups * regimes + group // groups  # Of steps of one regime.
    ones = xp.ones_like(times)
    of_block = sums(bins(without), ones, block, blocks)
    number = xp.maximum(of_block[:, :1], 1)
    place = block * regimes * groups + group
    share = total(place, ones, blocks * regimes * groups)
    share = share.reshape(blocks, -1) / number
    product = np.matmul if xp is np else ft.partial(jnp.matmul, precision="highest")
    cancelled = xp.sqrt(xp.sum(share**2, axis=1))[block]
    of_set = group // groups * groups + (step + block) % groups
    own_draws = sums(of_times, cancelled, of_set, regimes * groups)
    moved = decided - product(share.T, of_block) + own_draws
    by_group = regimes, groups, -1
    return GroupSums(decided.reshape(by_group), moved.reshape(by_group))


def errors_by_group(sums: GroupSums) -> Errors:
    """The errors of a law: of its mean, its standard deviation, and the share of steps up to each
    threshold, which are those at `LEVELS`. How many steps are in a regime of the network is set, so
    it does not scatter.
    """
    decided, moved = np.asarray(sums, np.float64)
    total = decided.sum(axis=1, keepdims=True)
    moved = moved - moved[..., :1] * total / np.maximum(total[..., :1], 1)
    moved, decided = moved.sum(axis=0), decided.sum(axis=0)
    total, number, groups = decided.sum(axis=0), decided[:, 0].sum(), len(decided)

    def figures(x):
        shift, square = x[:, 1] / number, x[:, 2] / number
        return np.column_stack(
            [shift, np.sqrt(np.maximum(square - shift**2, 0)), x[:, 3:] / number]
        )

    apart = figures(total - moved)
    apart = (apart.mean(axis=0) - apart) * np.sqrt(groups / (groups - 1))
    sides = np.array([decided[:, 3:], decided[:, :1] - decided[:, 3:]])
    # A group holds a pair of samples at least; but few steps look at only some of its samples. As
    # many groups of equally many steps would scatter as much.
    of_all = float(min(2 * number**2 / np.sum(decided[:, 0] ** 2), number))
    of_side = np.minimum(2 * (sides > 0).sum(axis=1), sides.sum(axis=1)).min(axis=0)
    return errors_of_figures(scatters(apart, _MOST_SKEWNESS), of_all, of_side)
