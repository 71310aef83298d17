"""The exact rule: draws the replicas that can be the slowest at some sink."""

import dataclasses
import functools as ft
from collections.abc import Iterator

import numpy as np

from ._decision import AbstractDecision, AbstractOneDecides, Systematic
from ._drawn import ERROR_STEPS, Drawn, DrawnErrors
from ._errors import AbstractErrors, UnknownErrors
from ._reservoir import Replicas
from ._selection import Selection


# The slowest samples of each sink are looked at: 14 in a step, on average.
_CANDIDATES = 14
_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class ExactRule(AbstractDecision):
    """Each sink has its own slowest replica: of R replicas, a step draws those that can be the
    slowest at some sink.
    """

    kept: Replicas
    systematic: Systematic
    selections: tuple[Selection, ...]

    def ends(self, first: int, count: int) -> np.ndarray:
        starts = range(first, first + count, _BLOCK)
        return np.concatenate([self._of_block(start) for start in starts])[:count]

    def _of_block(self, first: int) -> np.ndarray:
        ends = np.zeros((_BLOCK, self.kept.ends.shape[1]), self.kept.ends.dtype)
        for drawn in self.drawn(first):
            values = self.kept.ends[self.selections[drawn.regime].order[drawn.positions]]
            ends[drawn.steps] = np.maximum.reduceat(values, drawn.starts, axis=0)
        return ends

    def drawn(self, first: int) -> Iterator[Drawn]:
        """The replicas drawn for a block of steps, one regime after the other."""
        regimes = self.systematic.regimes(first, _BLOCK)
        rng = self.systematic.generator(0, first)
        for g, selection in enumerate(self.selections):
            steps = np.flatnonzero(regimes == g)
            if not len(steps):
                continue
            chosen, cumulative = self._candidates[g]
            mass = cumulative[-1]
            drawn = rng.binomial(selection.num_replicas, min(mass, 1), len(steps))
            drawn = np.maximum(drawn, 1)
            picked = np.searchsorted(cumulative / mass, rng.random(drawn.sum()))
            starts = np.concatenate([[0], np.cumsum(drawn)[:-1]])
            yield Drawn(g, steps, chosen[np.minimum(picked, len(chosen) - 1)], starts)

    @ft.cached_property
    def _candidates(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each regime, the positions in its selection of the samples that can be the slowest at
        a sink, and the weight up to each of them.
        """
        found = []
        for selection in self.selections:
            share = _CANDIDATES / selection.num_replicas
            candidate = np.zeros(len(selection.order), bool)
            for row in self.kept.ends[selection.order].T:
                slowest = np.argsort(-row, kind="stable")
                above = np.cumsum(selection.weights[slowest]) - selection.weights[slowest]
                candidate[slowest[above < share]] = True
            chosen = np.flatnonzero(candidate)
            found.append((chosen, np.cumsum(selection.weights[chosen])))
        return found

    def errors(self, num_steps: int) -> AbstractErrors:
        starts = range(0, min(num_steps, ERROR_STEPS), _BLOCK)
        blocks = [list(self.drawn(start)) for start in starts]
        return DrawnErrors(self.selections, blocks, num_steps)


@dataclasses.dataclass(frozen=True)
class SlowestDrawn(AbstractOneDecides):
    """The vector rule with the random numbers of the exact rule: of the replicas that the exact
    rule draws, a step takes the slowest as a whole. (It is among them, because it is the slowest at
    its slowest sink.)
    """

    exact: ExactRule

    @property
    def kept(self) -> Replicas:
        return self.exact.kept

    @property
    def systematic(self) -> Systematic:
        return self.exact.systematic

    def samples(self, first: int, count: int) -> np.ndarray:
        found = np.zeros(-(-count // _BLOCK) * _BLOCK, np.int64)
        for start in range(0, count, _BLOCK):
            for drawn in self.exact.drawn(first + start):
                order = self.exact.selections[drawn.regime].order
                found[start + drawn.steps] = order[drawn.slowest()]
        return found[:count]

    def errors(self, num_steps: int) -> AbstractErrors:
        return UnknownErrors()
