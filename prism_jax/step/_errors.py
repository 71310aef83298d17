"""Standard errors of figures of steps, from what decided them."""

import abc
from collections.abc import Sequence

import numpy as np

from .._misc import dot
from ._selection import Selection


# How many steps, at most, the neighbourhood of a threshold is found from.
_SOME_STEPS = 2**16


class AbstractErrors(abc.ABC):
    """Standard errors of means over steps, and how many independent samples are behind them."""

    @abc.abstractmethod
    def of_mean(self, contribution: np.ndarray) -> float:
        """Of the mean of contributions, which sum to zero."""

    @abc.abstractmethod
    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[float, float]:
        """Of the share of steps up to a threshold, and how many independent replica samples lie
        beyond it, on the poorer side.
        """

    @abc.abstractmethod
    def support(self) -> float:
        """How many independent replica samples the steps come from."""


class UnknownErrors(AbstractErrors):
    """Nothing is known."""

    def of_mean(self, contribution: np.ndarray) -> float:
        return float("nan")

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[float, float]:
        return float("nan"), 0.0

    def support(self) -> float:
        return 0.0


class IndependentErrors(AbstractErrors):
    """Steps are independent, and weigh the same."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps

    def of_mean(self, contribution: np.ndarray) -> float:
        return float(np.std(contribution) / np.sqrt(self._num_steps))

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[float, float]:
        share = np.mean(steps <= threshold)
        error = float(np.sqrt(share * (1 - share) / self._num_steps))
        return error, float(min(share, 1 - share) * self._num_steps)

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
        """For each regime, the sum of what the steps that picked each sample contribute."""
        totals = [np.zeros(len(selection.order)) for selection in self._selections]
        start = 0
        for regimes, position in self._picks:
            mine = values[start : start + len(position)]
            start += len(position)
            for g, total in enumerate(totals):
                members = slice(None) if len(totals) == 1 else regimes == g
                total += np.bincount(position[members], mine[members], minlength=len(total))
        return totals

    def of_mean(self, contribution: np.ndarray) -> float:
        return self._error(self._totals(contribution))

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[float, float]:
        below = steps <= threshold
        share = np.mean(below)
        counts = self._totals(below)
        error = self._error(counts)
        atom = self.atom(steps, threshold, float(share), error)
        return float(np.hypot(error, atom)), self._poorer(counts)

    def support_beyond(self, below: np.ndarray) -> float:
        """How many independent replica samples lie beyond a threshold, on the poorer side, from
        which steps are `below` it.
        """
        return self._poorer(self._totals(below))

    def _poorer(self, counts: list[np.ndarray]) -> float:
        above = [n - c for c, n in zip(counts, self._number, strict=True)]
        return min(_support(counts), _support(above))

    def atom(self, steps: np.ndarray, threshold: float, share: float, error: float) -> float:
        """Where one sample decides many steps that are as good as equal, the distribution function
        has a step of that height, and is not known better: the share of steps that the sample at
        the threshold decides, as near to it as half the standard error makes no difference. Where
        a step's own draws spread these steps, few are.
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
        """The regime of a step, and the position that it picked."""
        for regimes, position in self._picks:
            if step < len(position):
                return int(regimes[step]), int(position[step])
            step -= len(position)
        raise IndexError(step)

    def support(self) -> float:
        return _support(self._number)

    def _error(self, totals: list[np.ndarray]) -> float:
        overall = sum(float(total.sum()) for total in totals) / self._num_steps
        squares = 0.0
        for selection, total, number in zip(self._selections, totals, self._number, strict=True):
            if number.sum() > 0:
                common = total.sum() / number.sum()
                own = total - number * common
                squares += selection.standard_error(own / self._num_steps) ** 2
                # How many steps a regime has is dealt out evenly, and is off by about one.
                squares += ((common - overall) / self._num_steps) ** 2
        return float(np.sqrt(squares))


def _support(counts: list[np.ndarray]) -> float:
    total = sum(float(c.sum()) for c in counts)
    squares = sum(dot(c, c) for c in counts)
    return total**2 / squares if squares > 0 else 0.0
