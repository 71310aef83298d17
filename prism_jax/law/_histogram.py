"""Step times counted in bins, with the extreme ones kept exactly."""

import dataclasses
import functools as ft
from collections.abc import Sequence

import numpy as np

from ._compared import AbstractCompared


NUM_BINS = 2**16
NUM_EXTREMES = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram(AbstractCompared):
    """The distribution of step times, in memory of fixed size.

    **Attributes:**

    - `edges`: the two ends of a grid of equal bins, in seconds.
    - `counts`: `(bins + 2,)`, the number of steps below the grid, in each bin, and above the grid.
    - `smallest`, `largest`: the shortest and the longest step times, exactly, in ascending order:
        up to 10,000 of each.
    """

    edges: tuple[float, float]
    counts: np.ndarray
    smallest: np.ndarray
    largest: np.ndarray

    @ft.cached_property
    def num_samples(self) -> int:
        """The number of steps."""
        return int(self.counts.sum())

    def quantile(self, levels: np.ndarray) -> np.ndarray:
        """The quantiles at `levels` in [0, 1], in seconds, with the shape of `levels`."""
        position = levels * (self.num_samples - 1)
        times, below = self._knots
        low, high = len(self.smallest), self.num_samples - len(self.largest)
        from_low = np.interp(position, np.arange(low), self.smallest)
        from_high = np.interp(position, np.arange(high, self.num_samples), self.largest)
        result = np.where(position <= low - 1, from_low, np.interp(levels, below, times))
        return np.where(position >= high, from_high, result)

    def cdf(self, times: np.ndarray) -> np.ndarray:
        """The share of the steps that take at most `times` seconds, with the shape of `times`."""
        total, kept = self.num_samples, len(self.smallest)
        from_low = np.searchsorted(self.smallest, times, "right") / total
        if kept == total:  # Without the knots of each of many small laws.
            return from_low
        from_high = 1 - (kept - np.searchsorted(self.largest, times, "right")) / total
        result = np.where(times < self.smallest[-1], from_low, np.interp(times, *self._knots))
        return np.where(times >= self.largest[0], from_high, result)

    def misses(self, levels: np.ndarray) -> np.ndarray:
        """Whether the quantiles at `levels` lie between the grid and the extreme steps, where only
        the number of steps is known.
        """
        _, below = self._knots
        under, over = levels < below[1], levels > below[-2]
        return (under & (levels > below[0])) | (over & (levels < below[-1]))

    @ft.cached_property
    def _knots(self) -> tuple[np.ndarray, np.ndarray]:
        """Times between which steps are taken to be spread evenly, and the share of the steps below
        each time. They are the innermost of the extreme steps and, between these, the edges of all
        bins. So steps beyond the grid lie between it and the extreme steps.
        """
        total, kept = self.num_samples, len(self.smallest)
        ends = self.smallest[-1:], self.largest[:1]
        edges = np.clip(np.linspace(*self.edges, NUM_BINS + 1), *ends)
        # `counts[0]` has the steps below the grid, which count at its first edge.
        below = np.clip(np.cumsum(self.counts)[:-1], kept, total - kept)
        times = np.concatenate([ends[0], edges, ends[1]])
        return times, np.concatenate([[kept], below, [total - kept]]) / total


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """The histogram of all steps of several histograms, which must have the same grid."""
    low = np.sort(np.concatenate([histogram.smallest for histogram in histograms]))
    high = np.sort(np.concatenate([histogram.largest for histogram in histograms]))
    return Histogram(
        edges=histograms[0].edges,
        counts=ft.reduce(np.add, (histogram.counts for histogram in histograms)),
        smallest=low[:NUM_EXTREMES],
        largest=high[-NUM_EXTREMES:],
    )
