"""The replicas that steps draw, and the standard errors from them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .._estimate import Scatter
from .._misc import dot
from ._errors import AbstractErrors, SelectionErrors, with_atom
from ._selection import Selection


# Standard errors are found from the first steps: what their scatter adds is known, and taken away.
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


class DrawnErrors(AbstractErrors):
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
        self._selections = selections
        self._num_steps = num_steps
        sizes = [sum(len(drawn.steps) for drawn in block) for block in blocks]
        self._some = min(sum(sizes), num_steps)
        picks, found = [], [[] for _ in selections]
        for start, size, block in zip(np.cumsum([0, *sizes[:-1]]), sizes, blocks, strict=True):
            regimes, position = np.zeros(size, np.uint8), np.zeros(size, np.int32)
            for one in block:
                regimes[one.steps], position[one.steps] = one.regime, one.slowest()
                number = np.diff(one.starts, append=len(one.positions))
                steps = np.repeat(start + one.steps, number)
                found[one.regime].append((one.positions, steps))
            picks.append((regimes[: self._some - start], position[: self._some - start]))
        self._slowest = SelectionErrors(selections, picks, self._some)
        self._drawn = [
            _counts(some, (len(selection.order), sum(sizes)))[:, : self._some]
            for selection, some in zip(selections, found, strict=True)
        ]

    def of_mean(self, contribution: np.ndarray) -> Scatter:
        _, skewness, degrees = self._slowest.of_mean(contribution[: self._some])
        some = contribution[: self._some].astype(np.float64)
        some -= some.mean()
        variance = 0.0
        for selection, drawn in zip(self._selections, self._drawn, strict=True):
            mine = drawn.sum(axis=0) > 0
            if mine.any():
                # As in `SelectionErrors`: how many steps a regime has is dealt out evenly.
                common = some[mine].mean()
                some[mine] -= common
                variance += (common / self._num_steps) ** 2
                variance += max(_of_regime(selection, drawn, some, mine), 0.0)
        variance += dot(some, some) / self._some / self._num_steps
        return Scatter(float(np.sqrt(variance)), skewness, degrees)

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[Scatter, float]:
        below = (steps <= threshold).astype(np.float64)
        share = float(np.mean(below))
        found = self.of_mean(below - share)
        some = steps[: self._some]
        atom = self._slowest.atom(some, threshold, share, found.error)
        return with_atom(found, atom), self._slowest.support_beyond(some <= threshold)

    def support(self) -> float:
        return self._slowest.support()


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
