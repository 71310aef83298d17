"""Steps counted in bins, with the extreme ones kept exactly."""

import dataclasses
import functools as ft
from collections.abc import Sequence

import numpy as np

from ._compared import AbstractCompared


NUM_BINS = 2**16
NUM_EXTREMES = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram(AbstractCompared):
    """The distribution of steps, in memory of fixed size.

    **Attributes:**

    - `edges`: the two ends of a grid of `NUM_BINS` equal bins, in seconds.
    - `counts`: `(NUM_BINS + 2,)`, steps below the grid, in each bin, and above.
    - `smallest`, `largest`: the extreme steps, exactly, in ascending order: all, or `NUM_EXTREMES`.
    """

    edges: tuple[float, float]
    counts: np.ndarray
    smallest: np.ndarray
    largest: np.ndarray

    @ft.cached_property
    def num_samples(self) -> int:
        """How many steps there are."""
        return int(self.counts.sum())

    def quantile(self, levels: np.ndarray) -> np.ndarray:
        """The quantiles at levels in [0, 1], of their shape, in seconds; `nan` for the rare levels
        that lie beyond the grid and short of the extremes.
        """
        position = levels * (self.num_samples - 1)
        grid, below = self._grid()
        inside = (levels >= below[0]) & (levels <= below[-1])
        result = np.where(inside, np.interp(levels, below, grid), np.nan)
        low, high = len(self.smallest), self.num_samples - len(self.largest)
        from_low = np.interp(position, np.arange(low), self.smallest)
        result = np.where(position <= low - 1, from_low, result)
        from_high = np.interp(position, np.arange(high, self.num_samples), self.largest)
        return np.where(position >= high, from_high, result)

    def cdf(self, times: np.ndarray) -> np.ndarray:
        """The share of the steps that take at most so many seconds, of the shape of `times`."""
        low = np.searchsorted(self.smallest, times, "right") / self.num_samples
        beyond = len(self.largest) - np.searchsorted(self.largest, times, "right")
        result = np.interp(times, *self._grid())
        result = np.where(times >= self.largest[0], 1 - beyond / self.num_samples, result)
        return np.where(times < self.edges[0], low, result)

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """The edges of all bins, and the share of the steps below each."""
        # `counts[0]` lies below the grid, and counts for its first edge.
        below = np.cumsum(self.counts)[:-1] / self.num_samples
        return np.linspace(*self.edges, NUM_BINS + 1), below


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """The histogram of all steps of several, which must have the same grid."""
    low = np.sort(np.concatenate([one.smallest for one in histograms]))
    high = np.sort(np.concatenate([one.largest for one in histograms]))
    return Histogram(
        edges=histograms[0].edges,
        counts=np.sum([one.counts for one in histograms], axis=0),
        smallest=low[:NUM_EXTREMES],
        largest=high[-NUM_EXTREMES:],
    )
