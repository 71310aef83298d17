"""Gathers composed steps into a law, in memory that does not grow with their number."""

from typing import Any

import numpy as np

from ..law import LEVELS, NUM_BINS, NUM_EXTREMES, Law
from ._decide import BLOCK, Decision
from ._replica import TILE


# Standard errors are computed from at most so many steps, and are a little too large for more.
_ERROR_STEPS = 2**20


_ERRORS = ("mean_error", "std_error", "mean_support", "level_errors", "level_support")


def grid_of(pilot: np.ndarray) -> tuple[float, float]:
    """The two ends of the grid of bins, far beyond what the pilot saw."""
    low, middle, high = (float(x) for x in np.quantile(pilot, [0.01, 0.5, 0.99]))
    spread = max((high - low) / 4.65, 1e-9 * abs(middle), 1e-15)
    smallest, largest = float(pilot.min()), float(pilot.max())
    return (
        max(min(middle - 30 * spread, 2 * smallest - middle), 0.0),
        max(middle + 50 * spread, 2 * largest - middle),
    )


class Accumulator:
    """Running sums over the steps of one run."""

    def __init__(self, grid: tuple[float, float]):
        self.grid = grid
        self.num_samples = 0
        self._centre = 0.0
        self._sums = np.zeros(2)
        self._counts = np.zeros(NUM_BINS + 2, np.int64)
        self._smallest = np.zeros(0)
        self._largest = np.zeros(0)
        self._first: list[np.ndarray] = []

    def add(self, steps: np.ndarray) -> None:
        """Adds steps; they come in the order of their ids."""
        if self.num_samples < _ERROR_STEPS:
            self._first.append(steps)
        steps = np.asarray(steps, np.float64)
        if not self.num_samples:
            self._centre = float(steps[0])
        deviation = steps - self._centre
        # Tile by tile, so that the bits do not depend on how many come at once.
        for start in range(0, len(steps), TILE):
            tile = deviation[start : start + TILE]
            self._sums += [tile.sum(), np.sum(tile * tile)]
        low, high = self.grid
        bins = np.clip((steps - low) * (NUM_BINS / (high - low)) + 1, 0, NUM_BINS + 1)
        self._counts += np.bincount(bins.astype(np.int64), minlength=NUM_BINS + 2)
        self._extremes(steps)
        self.num_samples += len(steps)

    def _extremes(self, steps: np.ndarray) -> None:
        if len(self._smallest) == NUM_EXTREMES:
            low = np.concatenate([self._smallest, steps[steps < self._smallest[-1]]])
            high = np.concatenate([self._largest, steps[steps > self._largest[0]]])
        else:
            low = np.concatenate([self._smallest, steps])
            high = np.concatenate([self._largest, steps])
        self._smallest = np.sort(low)[:NUM_EXTREMES]
        self._largest = np.sort(high)[-NUM_EXTREMES:]

    def law(self, decision: Decision, like: Law | None = None, **about) -> Law:
        """The law of all steps. To be asked for once: it ends the accumulation.

        **Arguments:**

        - `like`: another part of the same run, as long as this one or nearly, whose errors hold
            for this one too, and need not be computed again.
        - `about`: further fields of the law.
        """
        n = self.num_samples
        shift, square = self._sums / n
        mean = self._centre + shift
        std = float(np.sqrt(max(square - shift**2, 0.0)))
        found = self._errors(decision) if like is None else {n: getattr(like, n) for n in _ERRORS}
        return Law(
            num_samples=n,
            mean=float(mean),
            std=std,
            edges=self.grid,
            counts=self._counts,
            smallest=self._smallest,
            largest=self._largest,
            **found,
            **about,
        )

    def _errors(self, decision: Decision) -> dict[str, Any]:
        """The fields of `_ERRORS`."""
        steps = np.concatenate(self._first)[:_ERROR_STEPS]
        self._first.clear()  # The largest arrays of a long run.
        errors = _Errors(decision, len(steps))
        thresholds = np.quantile(steps.copy(), LEVELS, overwrite_input=True)
        levels = [errors.of_level(steps, t) for t in thresholds]
        # In place from here on.
        steps -= np.mean(steps, dtype=np.float64).astype(steps.dtype)
        mean_error = errors.of_mean(steps)
        spread = np.std(steps, dtype=np.float64).astype(steps.dtype)
        steps *= steps
        steps -= spread**2
        steps /= 2 * spread if spread > 0 else 1
        return {
            "mean_error": mean_error,
            "std_error": errors.of_mean(steps),
            "mean_support": errors.support(),
            "level_errors": np.array([error for error, _ in levels]),
            "level_support": np.array([support for _, support in levels]),
        }


class _Errors:
    """Standard errors of means over steps, from what decided them."""

    def __init__(self, decision: Decision, num_steps: int):
        self._known = decision.rule == "vector"
        self._one_each = decision.one_each
        self._num_steps = num_steps
        self._selections = decision.selections
        if self._one_each or not self._known:
            return
        # For each block of steps: their regimes, and the positions that they picked.
        self._picks: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, num_steps, BLOCK):
            regimes, position = decision.picks(start, min(BLOCK, num_steps - start))
            self._picks.append((regimes.astype(np.uint8), position.astype(np.int32)))
        self._number = self._totals(np.ones(num_steps, bool))

    def _totals(self, values: np.ndarray) -> list[np.ndarray]:
        """For each regime, the sum of what the steps that picked each sample contribute."""
        totals = [np.zeros(len(selection.order)) for selection in self._selections]
        for i, (regimes, position) in enumerate(self._picks):
            mine = values[i * BLOCK :][: len(position)]
            for g, total in enumerate(totals):
                members = slice(None) if len(totals) == 1 else regimes == g
                total += np.bincount(position[members], mine[members], minlength=len(total))
        return totals

    def of_mean(self, contribution: np.ndarray) -> float:
        """Of the mean of contributions, which sum to zero."""
        if not self._known:
            return float("nan")
        if self._one_each:
            return float(np.std(contribution) / np.sqrt(self._num_steps))
        return self._error(self._totals(contribution))

    def of_level(self, steps: np.ndarray, threshold: float) -> tuple[float, float]:
        """Of the share of steps up to a threshold, and how many independent replica samples lie
        beyond it, on the poorer side.

        Where one sample decides many steps near the threshold, the distribution function has a
        step of that height there, and is not known better.
        """
        if not self._known:
            return float("nan"), 0.0
        below = steps <= threshold
        share = np.mean(below)
        if self._one_each:
            error = float(np.sqrt(share * (1 - share) / self._num_steps))
            return error, float(min(share, 1 - share) * self._num_steps)
        counts = self._totals(below)
        error = self._error([c - share * n for c, n in zip(counts, self._number, strict=True)])
        above = [n - c for c, n in zip(counts, self._number, strict=True)]
        atom = self._share_at(int(np.argmin(np.abs(steps - threshold))))
        return float(np.hypot(error, atom)), min(_support(counts), _support(above))

    def _share_at(self, step: int) -> float:
        """The share of steps that are decided by the same sample as this one."""
        block, place = divmod(step, BLOCK)
        regimes, position = self._picks[block]
        regime = int(regimes[place]) if len(self._number) > 1 else 0
        return float(self._number[regime][position[place]]) / self._num_steps

    def support(self) -> float:
        """How many independent replica samples the steps come from."""
        if self._one_each:
            return float(self._num_steps)
        return _support(self._number) if self._known else 0.0

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
