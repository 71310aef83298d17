"""Standard errors of figures of steps, from the samples that decided them."""

import abc
from collections.abc import Sequence

import numpy as np

from .._estimate import Scatter, scatter
from .._misc import dot
from ._selection import Selection


# How many steps, at most, the neighbourhood of a threshold is found from.
_SOME_STEPS = 2**16


class AbstractErrors(abc.ABC):
    """The scatter of means over steps, and the number of independent samples that they are from."""

    @abc.abstractmethod
    def of_mean(self, contribution: np.ndarray) -> Scatter:
        """The scatter of the mean of contributions, which sum to zero."""

    @abc.abstractmethod
    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[Scatter, float]:
        """The scatter of the share of steps up to a threshold, and how many independent replica
        samples lie above or below it, whichever are fewer.
        """

    @abc.abstractmethod
    def support(self) -> float:
        """How many independent replica samples the steps come from."""


class IndependentErrors(AbstractErrors):
    """Steps are independent and have equal weights."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps

    def of_mean(self, contribution: np.ndarray) -> Scatter:
        n = self._num_steps
        # Fourth powers of seconds over many steps are too small for single precision.
        each = contribution.astype(np.float64) / n
        squares = each * each
        return scatter(dot(each, each), dot(squares, each), dot(squares, squares))

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[Scatter, float]:
        n, share = self._num_steps, float(np.mean(steps <= threshold))
        square = share * (1 - share)
        found = scatter(
            square / n, square * (1 - 2 * share) / n**2, square * (1 - 3 * square) / n**3
        )
        return found, min(share, 1 - share) * n

    def support(self) -> float:
        return float(self._num_steps)


class SelectionErrors(AbstractErrors):
    """Steps pick replica samples, and one sample may decide many of them.

    `picks` has, for each block of steps, their regimes and the positions that they picked.
    """

    def __init__(
        self,
        selections: Sequence[Selection],
        picks: Sequence[tuple[np.ndarray, np.ndarray]],
        num_steps: int,
    ):
        self._num_steps = num_steps
        self._selections = selections
        self._picks = [(r.astype(np.uint8), position.astype(np.int32)) for r, position in picks]
        self._number = self._totals(np.ones(num_steps, bool))

    def _totals(self, values: np.ndarray) -> list[np.ndarray]:
        """For each regime, the sum of the contributions of the steps that picked each sample."""
        totals = [np.zeros(len(selection.order)) for selection in self._selections]
        start = 0
        for regimes, position in self._picks:
            mine = values[start : start + len(position)]
            start += len(position)
            for g, total in enumerate(totals):
                members = slice(None) if len(totals) == 1 else regimes == g
                total += np.bincount(position[members], mine[members], minlength=len(total))
        return totals

    def of_mean(self, contribution: np.ndarray) -> Scatter:
        return self._scatter(self._totals(contribution))

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[Scatter, float]:
        below = steps <= threshold
        share = np.mean(below)
        counts = self._totals(below)
        found = self._scatter(counts)
        atom = self.atom(steps, threshold, float(share), found.error)
        return with_atom(found, atom), self._poorer(counts)

    def _poorer(self, counts: list[np.ndarray]) -> float:
        """How many independent replica samples lie above or below a threshold, whichever are fewer,
        from how many steps below it each of them decides.
        """
        above = [n - c for c, n in zip(counts, self._number, strict=True)]
        return min(_support(counts), _support(above))

    def atom(self, steps: np.ndarray, threshold: float, share: float, error: float) -> float:
        """The jump of the distribution function at a threshold: the share of steps that are decided
        by the sample there, and lie so near the threshold that half the standard error makes no
        difference. If one sample decides many nearly equal steps, the distribution function is not
        known better than this jump. If the steps' own draws spread them, the jump is small.
        """
        some = steps[:: max(len(steps) // _SOME_STEPS, 1)]
        low, high = np.quantile(some, np.clip([share - error / 2, share + error / 2], 0, 1))
        near = (steps >= min(low, threshold)) & (steps <= max(high, threshold))
        regime, position = self._pick_of(int(np.argmin(np.abs(steps - threshold))))
        start, count = 0, 0
        for regimes, positions in self._picks:
            same = near[start : start + len(positions)] & (positions == position)
            count += int(np.sum(same & (regimes == regime)))
            start += len(positions)
        return count / self._num_steps

    def _pick_of(self, step: int) -> tuple[int, int]:
        """The regime of a step, and the position of the sample that it picked."""
        for regimes, position in self._picks:
            if step < len(position):
                return int(regimes[step]), int(position[step])
            step -= len(position)
        raise IndexError(step)

    def support(self) -> float:
        return _support(self._number)

    def _scatter(self, totals: list[np.ndarray]) -> Scatter:
        overall = sum(float(total.sum()) for total in totals) / self._num_steps
        sums = np.zeros(3)
        for selection, total, number in zip(self._selections, totals, self._number, strict=True):
            if number.sum() > 0:
                common = total.sum() / number.sum()
                own = total - number * common
                sums += selection.influences(own / self._num_steps)
                # How many steps a regime has is dealt out evenly, and is off by about one.
                sums[0] += ((common - overall) / self._num_steps) ** 2
        return scatter(*sums.tolist())


def with_atom(found: Scatter, atom: float) -> Scatter:
    """The scatter with a jump of the distribution function added, in either direction."""
    error = float(np.hypot(found.error, atom))
    own = found.error / error if error > 0 else 0.0
    return Scatter(error, found.skewness * own**3, found.degrees / own**4 if own else float("inf"))


def _support(counts: list[np.ndarray]) -> float:
    total = sum(float(c.sum()) for c in counts)
    squares = sum(dot(c, c) for c in counts)
    return total**2 / squares if squares > 0 else 0.0
