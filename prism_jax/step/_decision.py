"""Which replica decides each step."""

import abc
import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._misc import dot
from ..random import KeyData
from ._reservoir import Replicas, resample_factors
from ._selection import Chances, Selection, sample_weights, select
from ._systematic import BLOCK, Systematic


# So many steps in a row share a weight of their number in the bootstrap.
_ROW = 16


class AbstractDecision(abc.ABC):
    """How the steps of a run are decided. All methods count `first` from the start of the run."""

    kept: Replicas
    systematic: Systematic

    @abc.abstractmethod
    def ends(self, first: int, count: int) -> np.ndarray:
        """The ends of the sinks `(count, sinks)`; `first` is a multiple of `BLOCK`."""

    def inputs(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ends and regimes of `count` steps, from any first step on."""
        extra = first % BLOCK
        ends = self.ends(first - extra, count + extra)[extra:]
        return ends, self.systematic.regimes(first, count)


class Resampled(NamedTuple):
    """A decision with other weights of its samples.

    **Attributes:**

    - `decision`: by which steps pick samples anew.
    - `own`: `(steps,)`, the weight of each step that picks anew: its own draws are resampled, too.
    - `counts`: gives `(steps,)`, the weight of each step that keeps its sample and its own draws:
        by how much its sample is more likely to be picked with the new weights.
    """

    decision: "AbstractWeighed"
    own: np.ndarray
    counts: Callable[[], np.ndarray]


class AbstractWeighed(AbstractDecision):
    """A decision that the bootstrap can repeat with other weights of its samples."""

    @abc.abstractmethod
    def resample(self) -> Iterator[Resampled]:
        """The decision with new weights of the samples, several times. The factors on weights are
        exponential: Rubin, "The Bayesian bootstrap" (1981).
        """

    @abc.abstractmethod
    def scores(self) -> np.ndarray:
        """`(steps,)`, the score of the sample that decides each step: see [`Replicas`][]."""

    @abc.abstractmethod
    def of_samples(self, values: np.ndarray) -> np.ndarray:
        """For each sample the sum of a value of all steps that it decides."""


class AbstractOneDecides(AbstractWeighed):
    """One replica sample decides a step, and the derivative of the step goes through it."""

    @abc.abstractmethod
    def samples(self, first: int, count: int) -> np.ndarray:
        """The kept sample that decides each step."""

    def ends(self, first: int, count: int) -> np.ndarray:
        return self.kept.ends.take(self.samples(first, count), axis=0)

    def scores(self) -> np.ndarray:
        return self.kept.score[self.samples(0, self.systematic.num_steps)]

    def of_samples(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.samples(0, len(values)), values, len(self.kept.ids))


@dataclasses.dataclass(frozen=True)
class OneEach(AbstractOneDecides):
    """Each step is one replica sample, in order: there is one replica, with equal weights."""

    kept: Replicas
    systematic: Systematic

    def samples(self, first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count)

    def resample(self) -> Iterator[Resampled]:
        for factors in resample_factors(self.kept):
            counts = factors / np.mean(factors)
            yield Resampled(self, counts, lambda counts=counts: counts)


@dataclasses.dataclass(frozen=True)
class VectorRule(AbstractOneDecides):
    """A step picks the replica sample at the rank of its slowest replica.

    **Attributes:**

    - `selections`: for each regime of the network, how a step picks among the samples.
    """

    kept: Replicas
    systematic: Systematic
    selections: tuple[Selection, ...]

    def picks(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The regime of each step and its position in that regime's selection."""
        regimes, ranks = self.systematic.regimes(first, count), self.systematic.ranks(first, count)
        if len(self.selections) == 1:
            return regimes, self.selections[0].pick(ranks)
        position = np.zeros(count, np.int64)
        for g, selection in enumerate(self.selections):
            members = np.flatnonzero(regimes == g)
            if len(members):
                position[members] = selection.pick(ranks[members])
        return regimes, position

    def samples(self, first: int, count: int) -> np.ndarray:
        regimes, position = self.picks(first, count)
        order, starts = self._orders
        return order.take(position if len(starts) == 1 else position + starts[regimes])

    @ft.cached_property
    def _orders(self) -> tuple[np.ndarray, np.ndarray]:
        """The concatenated orders of all selections, and where each starts."""
        orders = [selection.order for selection in self.selections]
        return np.concatenate(orders), np.cumsum([0, *(len(order) for order in orders[:-1])])

    def resample(self) -> Iterator[Resampled]:
        regimes, position = self.picks(0, self.systematic.num_steps)
        own = _own_draws(regimes)
        for factors in resample_factors(self.kept):
            again = tuple(one.reweighted(factors[one.order]) for one in self.selections)
            counts = ft.partial(_counts, self.selections, again, regimes, position)
            yield Resampled(dataclasses.replace(self, selections=again), own(), counts)


def _counts(before: Sequence[Selection], again: Sequence[Selection], regimes, position):
    """By how much the samples that steps picked are more likely to be picked with new weights. If
    there are fewer steps than samples, each of these stands for those of its stratum around it.
    """
    counts = np.zeros(len(position))
    for g, (old, new) in enumerate(zip(before, again, strict=True)):
        steps = np.flatnonzero(regimes == g)
        picked, of_steps = position[steps], old.stratum[position[steps]]
        for s in np.unique(of_steps):
            members, mine = np.flatnonzero(old.stratum == s), np.flatnonzero(of_steps == s)
            some, which = np.unique(picked[mine], return_inverse=True)
            around = np.searchsorted((some[1:] + some[:-1] + 1) // 2, members, "right")
            old_chance, chance = (np.bincount(around, one.picked[members]) for one in (old, new))
            likelier = (chance / np.maximum(old_chance, 1e-300))[which]
            whole = len(mine) * chance.sum() / max(old_chance.sum(), 1e-300)
            counts[steps[mine]] = likelier * (whole / max(likelier.sum(), 1e-300))
    return counts


def _own_draws(regimes: np.ndarray) -> Callable[[], np.ndarray]:
    """Random weights of steps that keep how regimes and ranks are dealt: those of a few steps in a
    row, whose ranks are next to each other, sum to their number.
    """
    within = np.zeros(len(regimes), np.int64)
    for g in range(regimes.max() + 1):
        members = regimes == g
        within[members] = np.arange(np.sum(members))
    row = within // _ROW * (regimes.max() + 1) + regimes
    number, rng = np.bincount(row), np.random.default_rng(1)

    def draw() -> np.ndarray:
        weights = rng.exponential(size=len(regimes))
        return weights * (number / np.maximum(np.bincount(row, weights), 1e-300))[row]

    return draw


@dataclasses.dataclass(frozen=True)
class SlowestOf(AbstractWeighed):
    """The slowest of the replicas that several decisions pick, for replicas that differ. All of
    them have the network of the first.
    """

    decisions: tuple[AbstractWeighed, ...]

    @property
    def kept(self) -> Replicas:
        return self.decisions[0].kept

    @property
    def systematic(self) -> Systematic:
        return self.decisions[0].systematic

    def ends(self, first: int, count: int) -> np.ndarray:
        return ft.reduce(np.maximum, (one.ends(first, count) for one in self.decisions))

    def resample(self) -> Iterator[Resampled]:
        for each in zip(*(one.resample() for one in self.decisions), strict=True):
            decision = SlowestOf(tuple(one.decision for one in each))
            of_each = [one.counts for one in each]
            yield Resampled(decision, each[0].own, lambda x=of_each: np.prod([f() for f in x], 0))

    def scores(self) -> np.ndarray:
        return ft.reduce(np.maximum, (one.scores() for one in self.decisions))

    def of_samples(self, values: np.ndarray) -> np.ndarray:
        each = [one.of_samples(values) for one in self.decisions]
        return max(each, key=lambda x: dot(x, x))  # Of the replicas that fewer samples decide.


def decide(
    chances: Chances, kept: Replicas, key: KeyData, num_steps: int, *, num_replicas: int
) -> VectorRule | OneEach:
    """Sets up how steps are decided.

    **Arguments:**

    - `kept`: replica samples.
    - `num_replicas`: the number of replicas in a step.
    """
    weights = sample_weights(chances, kept)
    regime = chances.regime[kept.stratum]
    probabilities = chances.network
    present = np.bincount(regime, minlength=len(probabilities)) > 0
    if not present.all():  # Only in runs of a handful of samples.
        probabilities = np.where(present, probabilities, 0) / probabilities[present].sum()
    first, second = (int(word) for word in np.asarray(key))
    systematic = Systematic(probabilities, num_steps, (first, second), kept.first)
    # A single replica whose samples weigh the same needs no picking, and their order none either.
    one_each = num_replicas == len(probabilities) == len(kept.counts) == 1
    if one_each and len(weights) == num_steps and bool(weights.min() == weights.max()):
        return OneEach(kept, systematic)
    selections = tuple(
        select(kept, weights, regime == g, num_replicas) for g in range(len(probabilities))
    )
    return VectorRule(kept, systematic, selections)
