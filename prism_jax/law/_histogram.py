"""Step times: as they are while they are few, counted in bins when they are many."""

import dataclasses
import functools as ft
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from ._compared import AbstractCompared


# Of more steps than this, those whose times agree in so many bits after the leading one are a bin,
# which counts at the shortest of them: bins depend on the number of steps alone, so that laws can
# be merged in any order.
MOST_EXACT = 2**17
BITS = 18


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram(AbstractCompared):
    """The distribution of step times.

    **Attributes:**

    - `times`: the distinct step times, ascending, in seconds, of up to 2^17 steps; of more steps
        those without another one less than about 4 millionths below, so that memory does not grow
        with the steps.
    - `counts`: how many steps took each, or less than 4 millionths more.
    """

    times: Float[np.ndarray, " times"]
    counts: Int[np.ndarray, " times"]

    @property
    def num_samples(self) -> int:
        """The number of steps."""
        return int(self._up_to[-1])

    @ft.cached_property
    def _up_to(self) -> Int[np.ndarray, " times"]:
        """How many steps took each time or less."""
        return np.cumsum(self.counts)

    def quantile(self, levels: np.ndarray) -> np.ndarray:
        """The quantiles at `levels` in [0, 1], in seconds, with the shape of `levels`."""
        position = levels * (self.num_samples - 1)
        rank = np.floor(position)
        at = (self._up_to.searchsorted(rank + k, "right") for k in (0, 1))
        # There is none after the last step.
        low, high = (self.times[np.minimum(x, len(self.times) - 1)].astype(float) for x in at)
        return np.asarray(low + (position - rank) * (high - low))

    def cdf(self, times: np.ndarray) -> np.ndarray:
        """The share of the steps that take at most `times` seconds, with the shape of `times`."""
        up_to = np.append(0, self._up_to)[self.times.searchsorted(times, "right")]
        return np.asarray(up_to / self.num_samples)


def histogram_of(
    times: Float[np.ndarray, " steps"], counts: Int[np.ndarray, " steps"] | None = None
) -> Histogram:
    """The histogram of ascending times and of how many steps took each: by default one."""
    number = len(times) if counts is None else int(counts.sum())
    bins = times
    if number > MOST_EXACT:
        # The bits of a float after the leading one are its last.
        bits = times.view(f"i{times.itemsize}")
        bins = (bits & (-1 << (np.finfo(times.dtype).nmant - BITS))).view(times.dtype)
    shortest = np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
    ends = np.append(shortest[1:], len(times))
    up_to = ends if counts is None else np.cumsum(counts)[ends - 1]
    return Histogram(times[shortest], np.diff(up_to, prepend=0))


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """The histogram of all steps of several histograms."""
    times = np.concatenate([histogram.times for histogram in histograms])
    counts = np.concatenate([histogram.counts for histogram in histograms])
    order = np.argsort(times, kind="stable")
    return histogram_of(times[order], counts[order])
