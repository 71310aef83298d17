"""Gathers composed steps into a law, in memory that does not grow with their number."""

from typing import Any

import numpy as np

from ._errors import Errors
from ._histogram import NUM_BINS, NUM_EXTREMES, Histogram
from ._law import Law


# Standard errors are computed from at most this many steps, and are slightly too large for more.
_ERROR_STEPS = 2**20
# Sums are taken over this many steps at a time.
_TILE = 4096


def grid_of(pilot: np.ndarray) -> tuple[float, float]:
    """The two ends of the grid of bins, far beyond what the pilot saw."""
    low, middle, high = (float(x) for x in np.quantile(pilot, [0.01, 0.5, 0.99]))
    spread = max((high - low) / 4.65, 1e-9 * abs(middle)) or 1e-15
    smallest, largest = float(pilot.min()), float(pilot.max())
    return (
        max(min(middle - 30 * spread, 2 * smallest - middle), 0.0),
        max(middle + 50 * spread, 2 * largest - middle),
    )


def _smallest(steps: np.ndarray) -> np.ndarray:
    """The smallest steps, ascending."""
    if len(steps) > 2 * NUM_EXTREMES:  # Faster than to sort all of them.
        steps = np.partition(steps, NUM_EXTREMES)[:NUM_EXTREMES]
    return np.sort(steps)[:NUM_EXTREMES]


class Accumulator:
    """Running sums over the steps of one run."""

    def __init__(self, grid: tuple[float, float]):
        self.grid = grid
        self.num_samples: int = 0
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
        for start in range(0, len(steps), _TILE):
            tile = deviation[start : start + _TILE]
            self._sums += [tile.sum(), np.sum(tile * tile)]
        low, high = self.grid
        bins = np.clip((steps - low) * (NUM_BINS / (high - low)) + 1, 0, NUM_BINS + 1)
        self._counts += np.bincount(bins.astype(np.int64), minlength=NUM_BINS + 2)
        self._extremes(steps)
        self.num_samples += len(steps)

    def _extremes(self, steps: np.ndarray) -> None:
        full = len(self._smallest) == NUM_EXTREMES
        low = steps[steps < self._smallest[-1]] if full else steps
        high = steps[steps > self._largest[0]] if full else steps
        self._smallest = _smallest(np.concatenate([self._smallest, low]))
        self._largest = -_smallest(-np.concatenate([self._largest, high]))[::-1]

    def first_steps(self) -> np.ndarray:
        """The steps that standard errors are computed from. To be asked for once."""
        steps = np.concatenate(self._first)[:_ERROR_STEPS]
        self._first.clear()  # The largest arrays of a long run.
        return steps

    def law(self, errors: Errors, **about: Any) -> Law:
        """The law of all steps.

        **Arguments:**

        - `errors`: of its figures.
        - `about`: further fields of the law.
        """
        n = self.num_samples
        shift, square = self._sums / n
        return Law(
            mean=float(self._centre + shift),
            std=float(np.sqrt(max(square - shift**2, 0.0))),
            histogram=Histogram(self.grid, self._counts, self._smallest, self._largest),
            errors=errors,
            **about,
        )
