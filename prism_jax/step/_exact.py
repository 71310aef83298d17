"""Sets up how steps are decided; and the exact rule: the replicas that can be slowest somewhere."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from .._estimate import Scatter
from .._misc import dot
from ..random import KeyData
from ._decision import AbstractDecision, OneEach, VectorRule
from ._errors import AbstractErrors, SelectionErrors, with_atom
from ._reservoir import Replicas
from ._selection import Chances, Selection, sample_weights, select
from ._systematic import Systematic


# Standard errors use only so many steps, the first; the variance that this subsample adds is
# subtracted.
ERROR_STEPS = 2**15


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The replicas drawn for the steps of one regime of a block.

    **Attributes:**

    - `regime`: the regime of the steps.
    - `steps`: which steps of the block they are.
    - `positions`: the positions of the replicas in the regime's selection, step after step.
    - `starts`: where the positions of each step start.
    """

    regime: int
    steps: np.ndarray
    positions: np.ndarray
    starts: np.ndarray

    def slowest(self) -> np.ndarray:
        """The position of the slowest replica of each step, in the order of a selection."""
        return np.minimum.reduceat(self.positions, self.starts)


class DrawnErrors(SelectionErrors):
    """Standard errors if each step draws R replicas with replacement. The influence of a sample on
    a mean over steps is the covariance of contributions with the number of times that steps draw
    it. This is the infinitesimal jackknife, minus its bias from few steps (Wager, Hastie and Efron,
    "Confidence intervals for random forests: the jackknife and the infinitesimal jackknife", 2014).

    `blocks` has the replicas drawn for the first steps, in blocks of one size. The support is the
    number of samples that are the slowest of some step. Skewness and degrees of freedom, which few
    steps determine poorly, are those if these samples alone decided the steps.
    """

    def __init__(
        self, selections: Sequence[Selection], blocks: Sequence[Sequence[Drawn]], num_steps: int
    ):
        sizes = [sum(len(drawn.steps) for drawn in block) for block in blocks]
        some = min(sum(sizes), num_steps)
        picks, found = [], [[] for _ in selections]
        for start, size, block in zip(np.cumsum([0, *sizes[:-1]]), sizes, blocks, strict=True):
            regimes, position = np.zeros(size, np.uint8), np.zeros(size, np.int32)
            for one in block:
                regimes[one.steps], position[one.steps] = one.regime, one.slowest()
                number = np.diff(one.starts, append=len(one.positions))
                steps = np.repeat(start + one.steps, number)
                found[one.regime].append((one.positions, steps))
            picks.append((regimes[: some - start], position[: some - start]))
        super().__init__(selections, picks, some)
        self._all_steps = num_steps
        self._drawn = [
            _counts(mine, (len(selection.order), sum(sizes)))[:, :some]
            for selection, mine in zip(selections, found, strict=True)
        ]

    def of_mean(self, contribution: np.ndarray) -> Scatter:
        some = contribution[: self._num_steps]
        _, skewness, degrees = super().of_mean(some)
        some = some.astype(np.float64)
        some -= some.mean()
        variance = 0.0
        for selection, drawn in zip(self._selections, self._drawn, strict=True):
            mine = drawn.sum(axis=0) > 0
            if mine.any():
                # As in `SelectionErrors`: how many steps a regime has is dealt out evenly.
                common = some[mine].mean()
                some[mine] -= common
                variance += (common / self._all_steps) ** 2
                variance += max(_of_regime(selection, drawn, some, mine), 0.0)
        variance += dot(some, some) / self._num_steps / self._all_steps
        return Scatter(float(np.sqrt(variance)), skewness, degrees)

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[Scatter, float]:
        below = (steps <= threshold).astype(np.float64)
        share = float(np.mean(below))
        found = self.of_mean(below - share)
        some = steps[: self._num_steps]
        atom = self.atom(some, threshold, share, found.error)
        return with_atom(found, atom), self._poorer(self._totals(some <= threshold))


def _counts(found: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]):
    """How many times each step draws each sample: a sparse matrix `(samples, steps)`."""
    from scipy.sparse import csr_array

    if not found:
        return csr_array(shape)
    positions, steps = map(np.concatenate, zip(*found, strict=True))
    return csr_array((np.ones(len(steps)), (positions, steps)), shape)


def _of_regime(selection: Selection, drawn, some: np.ndarray, mine: np.ndarray) -> float:
    """The variance of the mean over newly drawn samples of a regime, whose steps are `mine`."""
    n, candidate = len(some), drawn.sum(axis=1) > 0
    expected = selection.num_replicas * selection.weights
    change = drawn @ some / n - expected * (some[mine].sum() / n)
    scatter = np.sum(expected[candidate]) * np.sum(some[mine] ** 2) / n**2
    # A step draws R in all, so more of the one are fewer of the others, all of these alike.
    rest = np.where(candidate, 0, selection.weights)
    change[~candidate] = 0
    if rest.sum() > 0:
        change -= rest * (change.sum() / rest.sum())
    centre = np.bincount(selection.stratum, change, len(selection.mass))
    centre /= np.where(selection.mass > 0, selection.mass, 1)
    change -= selection.weights * centre[selection.stratum]
    return dot(change, change) - scatter


# The slowest samples of each sink are looked at: 14 in a step, on average.
_CANDIDATES = 14
_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class ExactRule(AbstractDecision):
    """Each sink has its own slowest replica: of R replicas, a step draws those that can be the
    slowest at some sink.

    **Attributes:**

    - `candidates`: for each regime, the positions in its selection of the samples that can be the
        slowest at a sink, and the weight up to each of them.
    - `one_decides`: whether a step takes the slowest of these as a whole instead, by the vector
        rule with the same random numbers. (It is among them, because it is the slowest at its
        slowest sink.)
    """

    kept: Replicas
    systematic: Systematic
    selections: tuple[Selection, ...]
    candidates: Sequence[tuple[np.ndarray, np.ndarray]]
    one_decides: bool = False

    def ends(self, first: int, count: int) -> np.ndarray:
        starts = range(first, first + count, _BLOCK)
        return np.concatenate([self._of_block(start) for start in starts])[:count]

    def _of_block(self, first: int) -> np.ndarray:
        ends = np.zeros((_BLOCK, self.kept.ends.shape[1]), self.kept.ends.dtype)
        for drawn in self.drawn(first):
            order = self.selections[drawn.regime].order
            if self.one_decides:
                ends[drawn.steps] = self.kept.ends[order[drawn.slowest()]]
            else:
                values = self.kept.ends[order[drawn.positions]]
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
            chosen, cumulative = self.candidates[g]
            mass = cumulative[-1]
            drawn = rng.binomial(selection.num_replicas, min(mass, 1), len(steps))
            drawn = np.maximum(drawn, 1)
            picked = np.searchsorted(cumulative / mass, rng.random(drawn.sum()))
            starts = np.concatenate([[0], np.cumsum(drawn)[:-1]])
            yield Drawn(g, steps, chosen[np.minimum(picked, len(chosen) - 1)], starts)

    def errors(self, num_steps: int) -> AbstractErrors:
        starts = range(0, min(num_steps, ERROR_STEPS), _BLOCK)
        blocks = [list(self.drawn(start)) for start in starts]
        return DrawnErrors(self.selections, blocks, num_steps)


def _candidates(
    kept: Replicas, selections: Sequence[Selection]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """`candidates` of [`ExactRule`][]."""
    found = []
    for selection in selections:
        share = _CANDIDATES / selection.num_replicas
        candidate = np.zeros(len(selection.order), bool)
        for row in kept.ends[selection.order].T:
            slowest = _slowest(row, selection.weights, 1.01 * share)
            above = np.cumsum(selection.weights[slowest]) - selection.weights[slowest]
            candidate[slowest[above < share]] = True
        chosen = np.flatnonzero(candidate)
        found.append((chosen, np.cumsum(selection.weights[chosen])))
    return found


def _slowest(ends: np.ndarray, weights: np.ndarray, share: float) -> np.ndarray:
    """Samples with the latest ends, the latest first: at least as many as have a share of the
    weight.
    """
    number = len(ends) // 4
    if number:  # This quarter, with all that end with its last, is mostly enough.
        few = np.flatnonzero(ends >= np.partition(ends, -number)[-number])
        if weights[few].sum() > share:
            return few[np.argsort(-ends[few], kind="stable")]
    return np.argsort(-ends, kind="stable")


def decide(
    chances: Chances,
    kept: Replicas,
    key: KeyData,
    num_steps: int,
    *,
    num_replicas: int,
    exact: bool = False,
) -> AbstractDecision:
    """Sets up how steps are decided.

    **Arguments:**

    - `kept`: replica samples.
    - `num_replicas`: the number of replicas in a step; one if each sample is already the slowest of
        a step's replicas.
    - `exact`: whether each sink has a slowest replica of its own.
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
    one_each = not exact and num_replicas == len(probabilities) == len(kept.counts) == 1
    if one_each and len(weights) == num_steps and bool(weights.min() == weights.max()):
        return OneEach(kept, systematic)
    selections = tuple(
        select(kept, weights, regime == g, num_replicas, whole=exact)
        for g in range(len(probabilities))
    )
    if exact:
        return ExactRule(kept, systematic, selections, _candidates(kept, selections))
    return VectorRule(kept, systematic, selections)
