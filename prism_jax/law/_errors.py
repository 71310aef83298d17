"""Standard errors of the figures of a law.

They come from groups of replica samples. What a group adds to a figure is how the figure moves with
the weight of its samples: the sum, over the steps that they decide, of a function of the step minus
the same of the step without the sample that decides it. Which replica comes next is a draw, and a
step has draws of its own (factor, reductions, tail), which no group holds. So the second is the
mean over a block of steps next to each other in rank: the scatter of the next replica averages out,
and the step's own draws stay in the first. If all steps of a block are one group's, their own draws
cancel, and are added by sets of steps instead, one of each block. If a group has the share `s` of a
block, `s^2` of them cancel.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from .._estimate import deviations, skewed
from .._padding import AnyArray
from ._compared import AbstractCompared


# Levels at which the standard error of the distribution function is kept; between them, its ratio
# to sqrt(q (1 - q)) is interpolated.
_LOWER = np.array([1e-4, 1e-3, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.35])
LEVELS = np.concatenate([_LOWER, [0.5], 1 - _LOWER[::-1]])
# The share of the steps beyond each of them.
SHARES = np.minimum(LEVELS, 1 - LEVELS)
_BINOMIAL = np.sqrt(LEVELS * (1 - LEVELS))
# With fewer independent replica samples than this beyond a quantile, its interval is not known.
FEWEST = 20
# A range of levels is divided into parts so often; what is left is as good as straight.
_DIVISIONS, _PARTS = 3, np.linspace(0, 1, 33)
# Of 32 contributions, skewness is known poorly; beyond this Hall's transformation has no bound.
_MOST_SKEWNESS = 0.3


def more_steps(support: float, noun: str = "steps") -> str:
    """How many more steps a standard error needs that rests on so many independent samples."""
    if support < 1:  # No sample says how many.
        return f"far more {noun}, or ask for what is less far out"
    return f"about {math.ceil(FEWEST / support):,} times as many {noun}"


@dataclasses.dataclass(frozen=True, eq=False)
class Errors(AbstractCompared):
    """Standard errors of the figures of a law, and the number of independent replica samples from
    which they were estimated.

    **Attributes:**

    - `mean`, `std`: the standard errors of the mean and of the standard deviation, in seconds.
    - `mean_skewness`, `std_skewness`: the skewness of these two estimators.
    - `mean_degrees`, `std_degrees`: the degrees of freedom of these two standard errors.
    - `support`: how many independent replica samples, or allocations, the steps come from.
    - `levels`: the standard error of the distribution function at each quantile of a fixed list of
        levels.
    - `level_skewness`, `level_degrees`: the skewness of that estimator, and the degrees of freedom
        of its standard error, at each of these quantiles.
    - `level_support`: how many independent replica samples, or allocations, lie above or below
        each of these quantiles, whichever are fewer.
    """

    mean: float
    std: float
    mean_skewness: float
    std_skewness: float
    mean_degrees: float
    std_degrees: float
    support: float
    levels: np.ndarray
    level_skewness: np.ndarray
    level_degrees: np.ndarray
    level_support: np.ndarray

    @property
    def known(self) -> bool:
        """Whether there are enough independent replica samples to know the standard errors."""
        return self.support >= FEWEST

    def of_level(
        self, q: Float[ArrayLike, "*shape"]
    ) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
        """The standard errors of the distribution function at the quantiles at `q`, and the
        skewness of its estimators.
        """
        q = np.asarray(q)
        there = np.sqrt(q * (1 - q))
        error = np.asarray(np.interp(q, LEVELS, self.levels / _BINOMIAL) * there)
        skewness = np.interp(q, LEVELS, self.level_skewness * _BINOMIAL)
        return error, np.where(there > 0, skewness / np.where(there > 0, there, 1), 0)

    def interval_levels(
        self, q: Float[np.ndarray, " quantiles"], level: float
    ) -> Float[np.ndarray, "2 quantiles"]:
        """The two levels whose quantiles are the ends of a confidence interval for the quantile at
        each `q`: those at which the interval of the distribution function ends at `q`.
        """
        inverse = np.interp(q, LEVELS, SHARES / self.level_degrees) / np.minimum(q, 1 - q)
        reach = np.array([deviations(level, 1 / x if x > 0 else math.inf) for x in inverse])
        symmetric = np.stack([-reach, reach])[..., None]

        def reached(p: Float[np.ndarray, "2 quantiles points"]) -> Any:
            error, skewness = self.of_level(p)
            return p - skewed(symmetric, skewness) * error - q[:, None]

        # From `q` on, the first level at which it is otherwise. An interval of a small confidence
        # level may lie on one side of a skewed estimate.
        near = np.stack([q, q])[..., None]
        is_reached = reached(near) >= 0
        ends = np.concatenate([near, np.where(is_reached, 0.0, 1.0)], axis=-1)
        # To import SciPy's solvers takes longer than all figures.
        for _ in range(_DIVISIONS):
            points = ends[..., :1] + (ends[..., 1:] - ends[..., :1]) * _PARTS
            beyond = reached(points)
            turns = (beyond[..., 1:] >= 0) != is_reached
            turns[..., -1] = True
            part = np.argmax(turns, axis=-1, keepdims=True) + np.arange(2)
            ends, beyond = (np.take_along_axis(x, part, axis=-1) for x in (points, beyond))
        (near, far), (at_near, at_far) = np.moveaxis(ends, -1, 0), np.moveaxis(beyond, -1, 0)
        apart = at_near - at_far
        return near + np.where(
            apart == 0, 0, (far - near) * at_near / np.where(apart == 0, 1, apart)
        )

    def support_beyond(self, q: Float[ArrayLike, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """How many independent replica samples lie beyond the quantile at each `q`."""
        # Support falls towards the tails about as the share beyond does.
        q = np.asarray(q)
        support = np.interp(q, LEVELS, self.level_support / SHARES) * np.minimum(q, 1 - q)
        # Beyond p90 of 200 samples are 20, although 1 - 0.9 is below 0.1.
        return np.asarray(np.round(support, 9))


def scatters(
    contributions: Float[np.ndarray, "groups figures"], most_skewness: float = math.inf
) -> Float[np.ndarray, "figures 3"]:
    """The scatter of figures from what each group of samples adds to them: the standard error, its
    skewness, and the degrees of freedom of the standard error, which is itself an estimate.

    The sum of fourth powers is the variance of the sum of squares. The part of it that is
    correlated with the estimate is skewness; the rest is noise of the standard error.
    """
    squares, cubes, fourths = (np.sum(contributions**power, axis=0) for power in (2, 3, 4))
    scatter = np.tile([0.0, 0.0, np.inf], (len(squares), 1))
    positive = squares > 0
    squares, cubes, fourths = squares[positive], cubes[positive], fourths[positive]
    skewness, noise = cubes / squares**1.5, fourths - cubes**2 / squares
    # The more of the scatter few groups hold, the less is known of it.
    degrees = np.full_like(squares, len(contributions) - 1)
    np.divide(2 * squares**2, noise, out=degrees, where=2 * squares**2 < degrees * noise)
    skewness = np.clip(skewness, -most_skewness, most_skewness)
    scatter[positive] = np.column_stack([np.sqrt(squares), skewness, degrees])
    return scatter


def errors_of_figures(
    scatter: Float[np.ndarray, "figures 3"], support: float, level_support: np.ndarray
) -> Errors:
    """The errors of a law from the `scatters` of its mean, of its standard deviation, and of the
    distribution function at each of `LEVELS`. The rest is as in [`Errors`][].
    """
    (mean, std), (error, skewness, degrees) = scatter[:2].tolist(), scatter[2:].T
    moments = mean[0], std[0], mean[1], std[1], mean[2], std[2]
    return Errors(*moments, support, error, skewness, degrees, level_support)


def figures_of_moments(
    moments: Float[np.ndarray, "*laws figures"],
) -> Float[np.ndarray, "*laws figures"]:
    """The mean, the standard deviation and the levels of laws, from the means of deviations from a
    centre and of their squares, and the levels.
    """
    mean, square, levels = moments[..., :1], moments[..., 1:2], moments[..., 2:]
    spread = np.sqrt(np.maximum(square - mean**2, 0.0))
    return np.concatenate([mean, spread, levels], axis=-1)


class GroupSums(NamedTuple):
    """Sums over steps, for each regime of the network and each group: of weights, of deviations
    from a centre, of the squares of these, and of how many steps are below each threshold.

    **Attributes:**

    - `decided`: over the steps that each group decided.
    - `moved`: by how much sums over all steps move with the weight of the group's samples, if a
        weight that is left is that of the mean of the regime.
    """

    decided: Float[AnyArray, "*laws regimes groups thresholds+3"]
    moved: Float[AnyArray, "*laws regimes groups thresholds+3"]


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

    def sums(steps, weight, place, length):
        deviation, below = steps
        moments = [total(place, weight * deviation**power, length) for power in range(3)]
        counts = total(place * kinds + below, weight, length * kinds).reshape(length, kinds)
        return xp.concatenate([xp.stack(moments, 1), xp.cumsum(counts, 1)[:, :-1]], axis=1)

    of_times = times - centre, xp.searchsorted(thresholds, times)
    decided = sums(of_times, xp.ones_like(times), group, regimes * groups)
    if without is None:
        decided = decided.reshape(regimes, groups, -1)
        return GroupSums(decided, decided)
    step, blocks = xp.arange(len(times), dtype=group.dtype), -(-len(times) // groups) * regimes
    block = step // groups * regimes + group // groups  # Of steps of one regime.
    ones = xp.ones_like(times)
    of_others = without - centre, xp.searchsorted(thresholds, without)
    of_block = sums(of_others, ones, block, blocks)
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


def errors_by_group(sums: GroupSums) -> list[Errors]:
    """The errors of laws, which are the first axis of the sums: of the mean, of the standard
    deviation, and of the share of steps up to each threshold, which are those at `LEVELS`. How many
    steps are in a regime of the network is set, so it does not scatter.
    """
    decided, moved = np.asarray(sums, np.float64)
    total = decided.sum(axis=2, keepdims=True)
    moved = moved - moved[..., :1] * total / np.maximum(total[..., :1], 1)
    moved, decided = moved.sum(axis=1), decided.sum(axis=1)
    total = decided.sum(axis=1, keepdims=True)
    laws, groups, _ = decided.shape
    number = total[..., :1]

    apart = figures_of_moments((total - moved)[..., 1:] / number)
    apart = (apart.mean(axis=1, keepdims=True) - apart) * np.sqrt(groups / (groups - 1))
    of_figures = np.moveaxis(apart, 1, 0).reshape(groups, -1)
    scatter = scatters(of_figures, _MOST_SKEWNESS).reshape(laws, -1, 3)
    sides = np.array([decided[..., 3:], decided[..., :1] - decided[..., 3:]])
    # A group holds a pair of samples at least; but few steps look at only some of its samples. As
    # many groups of equally many steps would scatter as much.
    number = number[:, 0, 0]
    of_all = np.minimum(2 * number**2 / np.sum(decided[..., 0] ** 2, axis=1), number)
    of_side = np.minimum(2 * (sides > 0).sum(axis=2), sides.sum(axis=2)).min(axis=0)
    return [*map(errors_of_figures, scatter, of_all.tolist(), of_side)]


def pooled_errors(errors: Sequence[Errors], shares: np.ndarray) -> Errors:
    """The errors of several independent laws together. Each law has a share of the steps."""
    error, skewness, degrees = np.moveaxis(np.array([_scatters(of_law) for of_law in errors]), 1, 0)
    error = shares[:, None] * error
    third = np.sum(error**3 * skewness, axis=0)
    # Half the variance of the square of it, by Welch and Satterthwaite.
    fourth = np.sum(error**4 / degrees, axis=0)
    error = np.sqrt(np.sum(error**2, axis=0))
    positive = error > 0
    skewness = np.divide(third, error**3, out=np.zeros_like(error), where=positive)
    degrees = np.divide(error**4, fourth, out=np.full_like(error, np.inf), where=fourth > 0)
    return errors_of_figures(
        np.column_stack([error, skewness, degrees]),
        sum(of_law.support for of_law in errors),
        np.sum([of_law.level_support for of_law in errors], axis=0),
    )


def _scatters(errors: Errors) -> np.ndarray:
    """The standard error of each figure, its skewness, and its degrees of freedom."""
    return np.array(
        [
            [errors.mean, errors.std, *errors.levels],
            [errors.mean_skewness, errors.std_skewness, *errors.level_skewness],
            [errors.mean_degrees, errors.std_degrees, *errors.level_degrees],
        ]
    )
