"""Standard errors of figures of steps, from what decided them."""

import abc
from collections.abc import Sequence

import numpy as np

from ._selection import Selection


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
        # Where one sample decides many steps near the threshold, the distribution function has a
        # step of that height there, and is not known better.
        below = steps <= threshold
        share = np.mean(below)
        counts = self._totals(below)
        error = self._error([c - share * n for c, n in zip(counts, self._number, strict=True)])
        above = [n - c for c, n in zip(counts, self._number, strict=True)]
        atom = self._share_at(int(np.argmin(np.abs(steps - threshold))))
        return float(np.hypot(error, atom)), min(_support(counts), _support(above))

    def _share_at(self, step: int) -> float:
        """The share of steps that are decided by the same sample as this one."""
        for regimes, position in self._picks:
            if step < len(position):
                regime = int(regimes[step]) if len(self._number) > 1 else 0
                return float(self._number[regime][position[step]]) / self._num_steps
            step -= len(position)
        raise IndexError(step)

    def support(self) -> float:
        return _support(self._number)

    def _error(self, totals: list[np.ndarray]) -> float:
        errors = [
            selection.standard_error(total / self._num_steps)
            for selection, total in zip(self._selections, totals, strict=True)
            if len(total)
        ]
        return float(np.sqrt(np.sum(np.square(errors))))


def _support(counts: list[np.ndarray]) -> float:
    total = sum(float(c.sum()) for c in counts)
    squares = sum(float(c @ c) for c in counts)
    return total**2 / squares if squares > 0 else 0.0
