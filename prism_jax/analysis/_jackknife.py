"""Standard errors by the jackknife, for every figure of the step time and its derivatives.

Replica samples are in groups by their ids. The law of steps without a group is that of the other
steps, and of what those that the group decided would be without the sample that decides them. A
figure of this law is computed as that of all steps is, and its standard error follows from how it
differs from group to group. Programs with common random numbers have common groups, so what they
have in common cancels in differences.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import betainc

from .._estimate import Estimate
from .._misc import dot, plural
from ..engine import SimulatedSteps, support
from ..law import FEWEST, more_steps
from ..step import GROUPS
from ._objectives import AbstractObjective, bandwidth


# Steps whose ranks are so many standard errors from that of a quantile do not count in it.
_FARTHEST = 6
# About a step are as many before it, and after it, as own draws move steps in rank on average; but
# at least so many, and at most one in so many of its kind.
_NEAR, _WINDOWS = GROUPS // 2, 128


@dataclasses.dataclass(frozen=True)
class Jackknifed:
    """Figures of simulated steps, and the same figures without each group of samples.

    **Attributes:**

    - `values`: `(figures,)`, the figures themselves.
    - `without`: `(groups, figures)`, without each group.
    - `support`: `(figures,)`, how many independent replica samples each figure rests on. With too
        few, its standard error is not known.
    """

    values: Float[np.ndarray, " figures"]
    without: Float[np.ndarray, "groups figures"]
    support: Float[np.ndarray, " figures"]

    @property
    def scatter(self) -> Float[np.ndarray, " figures"]:
        """The standard error of each figure, however few samples it rests on. A group's share of a
        sum is what the sum loses without it, for steps of all groups take the place of its own.
        """
        return np.sqrt(len(self.without)) * np.std(self.without, axis=0, ddof=1)

    @property
    def standard_error(self) -> Float[np.ndarray, " figures"]:
        """The standard error of each figure; `nan` where it is not known."""
        return np.where(self.support >= FEWEST, self.scatter, np.nan)

    @property
    def degrees(self) -> Float[np.ndarray, " figures"]:
        """The degrees of freedom of each standard error: few groups and few samples both make it
        uncertain.
        """
        return 1 / (1 / (len(self.without) - 1) + 1 / np.maximum(self.support, 1))

    def estimates(self) -> list[Estimate]:
        """An `Estimate` of each figure, in their order."""
        columns = (self.values, self.standard_error, self.degrees)
        return [Estimate(*map(float, row)) for row in zip(*columns, strict=True)]


def combined(function: Callable[..., np.ndarray], *parts: Jackknifed) -> Jackknifed:
    """Figures computed from others: `function` takes rows of figures, one array of rows for each
    argument, and returns rows. What rests on few samples in one argument does so in the result.
    """
    values = np.asarray(function(*(part.values[None] for part in parts))[0])
    fewest = ft.reduce(np.minimum, (part.support for part in parts))
    if fewest.shape != values.shape:
        fewest = np.full(values.shape, fewest.min(initial=np.inf))
    without = np.asarray(function(*(part.without for part in parts)))
    return Jackknifed(values, without, sure_of_zeros(values, without, fewest))


def sure_of_zeros(values: np.ndarray, without: np.ndarray, fewest: np.ndarray) -> np.ndarray:
    """The support of changes and derivatives: those that are zero without any group, such as by
    what does not vary, need no samples.
    """
    return np.where((values == 0) & (without == 0).all(axis=0), np.inf, fewest)


def stacked(*parts: Jackknifed) -> Jackknifed:
    """Several figures in one row."""
    return Jackknifed(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.without for part in parts], axis=1),
        np.concatenate([part.support for part in parts]),
    )


def jackknifed(simulated: SimulatedSteps, objectives: Sequence[AbstractObjective]) -> Jackknifed:
    """Figures of simulated steps."""
    ordered = np.sort(simulated.steps)
    values = [_value(objective, ordered) for objective in objectives]
    without = [
        [_value(objective, steps) for objective in objectives]
        for steps in without_groups(simulated)
    ]
    rests_on = [support_of(simulated, objective) for objective in objectives]
    return Jackknifed(np.array(values), np.array(without), np.array(rests_on))


def without_groups(simulated: SimulatedSteps) -> Iterator[Float[np.ndarray, " n"]]:
    """As many steps as were simulated, evenly spaced in their law without each group of samples, in
    ascending order. They may lie between two of the law: quantiles of programs that hardly differ
    must not differ by the distance of two steps.

    Steps next to each other in rank stand for each other: a group that decides a share of those
    about a step takes that share of it, and what the step would be without the sample that decides
    it comes instead. So which replica comes next, and the draws of the steps' own, whose scatter is
    not that of groups, average out. Of this scatter, each group leaves out one step of `GROUPS` in
    a row, the same one for every program: draws that programs have in common cancel.
    """
    steps, group = simulated.steps, simulated.deciders.group
    # Of one replica, others of its kind come instead.
    single = bool(np.isnan(simulated.without).all())
    shares = _shares(simulated, whole=single)
    times = np.concatenate([steps, steps if single else simulated.without])
    order = np.argsort(times, kind="stable")
    times, places = times[order], np.arange(len(steps)) + 0.5
    number = np.arange(len(steps))
    left_out_by = (number + number // GROUPS) % GROUPS
    for left_out, share in enumerate(shares):
        if single:
            weights = [group != left_out, share]
        else:
            is_left_out = left_out_by == left_out
            kept = 1 - is_left_out + is_left_out.mean()
            weights = [kept * (1 - share), kept * share]
        weights = np.concatenate(weights)[order]
        there = weights > 0
        weights = weights[there]
        yield np.interp(places, np.cumsum(weights) - weights / 2, times[there])


def _shares(simulated: SimulatedSteps, *, whole: bool) -> Iterator[Float[np.ndarray, " n"]]:
    """For each group, its share of the steps about each step, or of the `whole` of its kind. As
    many before as after a step are about it, so that what is linear in ranks stays as it is. The
    share is that over all first ranks: a sample that decides 1.5 steps decides 1 or 2.
    """
    kind = simulated.kind
    order, place = np.argsort(kind, kind="stable"), np.arange(len(kind))
    starts, sizes = np.unique(kind[order], return_index=True, return_counts=True)[1:]
    first, last = (np.repeat(at, sizes) for at in (starts, starts + sizes))
    if not whole:
        by_time = np.lexsort((-simulated.steps, kind))
        moved = max(_NEAR, int(np.abs(np.argsort(by_time)[order] - place).mean()))
        most = np.maximum(np.repeat(sizes // _WINDOWS, sizes), _NEAR)
        near = np.minimum(np.minimum(place - first, last - 1 - place), np.minimum(most, moved))
        first, last = place - near, place + near + 1
    ends, reached = np.arange(len(kind) + 1), np.cumsum(np.append(0.0, simulated.decides))
    for left_out in range(GROUPS):
        of_group = np.where(simulated.groups == left_out, simulated.decides, 0)
        before = np.interp(ends, reached, np.cumsum(np.append(0.0, of_group)))
        share = np.empty(len(kind))
        share[order] = (before[last] - before[first]) / (last - first)
        yield share


def _value(objective: AbstractObjective, steps: Float[np.ndarray, " n"]) -> float:
    """A figure of steps in ascending order. A quantile would move by the distance of two steps,
    which scatters: of two programs that differ by 2 %, up to four times as much as all else. So it
    is the mean of all steps, weighted by how likely each is the quantile of as many others (Harrell
    and Davis, "A new distribution-free quantile estimator", 1982), in values as in what is left of
    them without a group.
    """
    if objective.level is None:
        return objective.value(steps)
    first, weights = _quantile_weights(len(steps), objective.level)
    return dot(weights, steps[first : first + len(weights)])


@ft.lru_cache
def _quantile_weights(n: int, q: float) -> tuple[int, Float[np.ndarray, " near"]]:
    """Of `n` steps in ascending order, the first that may be the quantile of as many others, and
    how likely each from there on is.
    """
    far = _FARTHEST * math.sqrt(n * q * (1 - q)) + 1
    first, last = max(int(n * q - far), 0), min(int(n * q + far) + 1, n)
    ends = np.arange(first, last + 1) / n
    weights = np.diff(betainc((n + 1) * q, (n + 1) * (1 - q), ends))
    return first, weights / weights.sum()


def support_of(simulated: SimulatedSteps, objective: AbstractObjective) -> float:
    """How many independent replica samples a figure rests on. For a quantile far out, it is about
    the number beyond it.
    """
    influence = objective.influence(simulated.steps, bandwidth(simulated.steps, objective))
    largest = np.abs(influence).max()
    if largest > 0:
        return support(simulated, (influence / largest) ** 2)
    # Steps that are all equal are known; of steps that vary, none lies beyond the figure.
    return math.inf if np.ptp(simulated.steps) == 0 else 0.0


def withheld(what: str, rests_on: float) -> tuple[str, ...]:
    """A note for a figure whose standard error is not known; empty if it is."""
    if rests_on >= FEWEST:
        return ()
    num_samples = plural(round(rests_on), "independent replica sample")
    return (
        f"{what} rests on {num_samples}, and a standard error needs {FEWEST}: simulate "
        f"{more_steps(rests_on)}.",
    )
