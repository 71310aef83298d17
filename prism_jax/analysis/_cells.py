"""Measured steps as a histogram, whose counts are resampled in place of the steps, so that the
noise of a score takes no longer for more steps.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from ..law import Law, crps_of_each


_Cells = Float[np.ndarray, " cells"]
_Counts = Int[np.ndarray, " cells"]

# Of so many steps, each has a cell of its own; of more, cells have equal numbers of steps, and
# fewer towards both ends, where each step tells more of the spread.
_MOST_STEPS, _EVEN, _TO_THE_END = 4096, 2048, 1024


@dataclasses.dataclass(frozen=True)
class Cells:
    """Ordered steps as a histogram. The steps of a cell count as evenly spaced.

    **Attributes:**

    - `low`, `high`, `mean`, `variance`: the shortest and the longest step of each cell, and the
        mean and the variance of its steps.
    - `counts`: the number of its steps.
    """

    low: _Cells
    high: _Cells
    mean: _Cells
    variance: _Cells
    counts: _Counts

    def quantile(self, counts: _Counts, q: float) -> float:
        """The `q` quantile of so many steps of each cell, interpolated as that of NumPy."""
        ends = np.cumsum(counts)
        place = (ends[-1] - 1) * q
        step = np.minimum(np.floor(place) + np.arange(2), ends[-1] - 1)
        cell = np.searchsorted(ends, step, "right")
        share = (step - (ends - counts)[cell] + 0.5) / counts[cell]
        lower, upper = self.low[cell] + share * (self.high - self.low)[cell]
        return float(lower + (place - np.floor(place)) * (upper - lower))

    def below(self, counts: _Counts, times: np.ndarray) -> np.ndarray:
        """The share of so many steps of each cell that is up to each of some times."""
        cell = np.minimum(np.searchsorted(self.high, times, "right"), len(self.high) - 1)
        low, high = self.low[cell], self.high[cell]
        # A cell of one step is passed at once.
        share = np.clip((times - low) / np.where(high > low, high - low, np.inf), 0, 1)
        share = np.where(times >= high, 1, share)
        ends = np.cumsum(counts)
        return ((ends - counts)[cell] + share * counts[cell]) / ends[-1]


def cells_of(measured: Float[np.ndarray, " steps"]) -> Cells:
    """The cells of measured steps: at most 4,096."""
    steps, number = np.sort(measured), len(measured)
    edges = np.arange(number + 1)
    if number > _MOST_STEPS:
        ends = np.geomspace(1, number / _EVEN, _TO_THE_END)
        edges = np.concatenate([np.linspace(0, number, _EVEN + 1), ends, number - ends])
        edges = np.unique(np.rint(edges).astype(int))
    begin, counts = edges[:-1], np.diff(edges)
    mean = np.add.reduceat(steps, begin) / counts
    variance = np.add.reduceat((steps - np.repeat(mean, counts)) ** 2, begin) / counts
    return Cells(steps[begin], steps[edges[1:] - 1], mean, variance, counts)


def figures_by_counts(
    law: Law, predicted: Float[np.ndarray, " quantiles"], cells: Cells
) -> Callable[[_Counts], dict[str, float]]:
    """The figures of a `Score` as a function of the number of steps in each cell.

    **Arguments:**

    - `predicted`: evenly spaced quantiles of the law, in ascending order.
    """
    low, high, middle = law.quantile(0.05), law.quantile(0.95), np.median(predicted)
    number, steps = len(predicted), cells.mean
    covered = np.array([np.nextafter(low, -np.inf), high])
    # The distance of two laws is the integral of that of their distribution functions.
    times = np.sort(np.concatenate([predicted, steps]))
    law_below = np.searchsorted(predicted, times, "right") / number
    reached, apart = np.searchsorted(steps, times, "right"), np.diff(times)
    scores = crps_of_each(predicted, steps)
    just_before = np.nextafter(predicted, -np.inf)
    before_law, at_law = (
        np.searchsorted(predicted, at, "right") / number for at in (just_before, predicted)
    )

    def farthest(counts: _Counts, shift: float) -> float:
        """The Kolmogorov-Smirnov distance of the law from the steps, each `shift` longer. Between
        two of its samples the distribution function of the law is constant and that of the steps
        grows, so they are farthest apart at a sample, or just before one.
        """
        return float(
            max(
                np.abs(at_law - cells.below(counts, predicted - shift)).max(),
                np.abs(before_law - cells.below(counts, just_before - shift)).max(),
            )
        )

    def figures(counts: _Counts) -> dict[str, float]:
        many, before = counts.sum(), np.concatenate([[0], np.cumsum(counts)])
        mean = counts @ steps / many
        spread = np.sqrt(counts @ (cells.variance + (steps - mean) ** 2) / (many - 1))
        first, last = np.flatnonzero(counts)[[0, -1]]
        varies = cells.high[last] > cells.low[first]
        difference = np.abs(law_below - before[reached] / many)
        return {
            "mean_error": float(law.mean / mean - 1),
            "p95_error": float(high / cells.quantile(counts, 0.95) - 1),
            "std_ratio": float(law.std / spread) if varies else np.nan,
            "ks": farthest(counts, 0.0),
            "ks_aligned": farthest(counts, middle - cells.quantile(counts, 0.5)),
            "w1_s": float(difference[:-1] @ apart),
            "crps_s": float(counts @ scores / many),
            "coverage_90": float(np.diff(cells.below(counts, covered))[0]),
        }

    return figures
