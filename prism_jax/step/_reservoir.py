"""Samples of one replica, kept on the host in memory of fixed size."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np


# What is kept of a long run: its first samples, which stand for all of it, and its slowest ones.
RESERVOIR = 2**18
EXTREMES = 2**17
NUM_RESAMPLES = 16
_SLACK = 2**15
# Factors on weights for the bootstrap are common to every 4093rd sample: a prime, so that they do
# not follow strata, which are dealt evenly.
_GROUPS = 4093


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Replica samples: the slowest ones, and the first ones, which represent all others.

    **Attributes:**

    - `ids`: `(n,)`, sample ids, ascending.
    - `ends`: `(n, sinks)`, when each sink ends, in seconds.
    - `score`: `(n,)`, by which the vector rule sorts: the end of the slowest sink, plus the mean
        time of the gradient reductions from it on.
    - `stratum`: `(n,)`, the stratum of each sample.
    - `likelihood`: `(n,)`, the likelihood ratio of the law to the law that the sample was drawn
        from.
    - `counts`: `(strata,)`, how many samples were drawn in each stratum, kept or not.
    - `first`: the first id.
    """

    ids: np.ndarray
    ends: np.ndarray
    score: np.ndarray
    stratum: np.ndarray
    likelihood: np.ndarray
    counts: np.ndarray
    first: int = 0

    @property
    def drawn(self) -> int:
        """How many samples were drawn."""
        return int(self.counts.sum())

    @property
    def side(self) -> np.ndarray:
        """`(n,)`, 1 for samples that importance sampling shifts, which is every other one, and -1
        for the rest of them; 0 if none is shifted.
        """
        side = np.where(self.ids % np.uint32(2) == 1, 1, -1)
        return side if (self.likelihood != 1).any() else 0 * side


def resample_factors(kept: Replicas) -> Iterator[np.ndarray]:
    """For each turn of the bootstrap, the factors on the weights of samples. They depend on the ids
    alone, so differences between programs with common random numbers scatter as they should.

    A run has as many samples of each stratum, and as many that are shifted, as any other: that is
    every other one of importance sampling. So their factors have a mean of one.
    """
    number = kept.ids - np.uint32(kept.first)
    group, part = number % np.uint32(_GROUPS), 2 * kept.stratum + (kept.side == 1)
    early = np.flatnonzero(number < RESERVOIR)  # These stand for all.
    counts = np.maximum(np.bincount(part[early], minlength=part.max() + 1), 1)
    rng = np.random.default_rng(0)
    for _ in range(NUM_RESAMPLES):
        factors = rng.exponential(size=_GROUPS)[group]
        mean = np.bincount(part[early], factors[early], len(counts)) / counts
        yield factors / np.where(mean > 0, mean, 1)[part]


class Reservoir:
    """Collects up to `most` replica samples from id `first` on, in arrays of fixed size. Samples
    that are neither among the first nor slow are dropped.
    """

    def __init__(self, num_sinks: int, num_strata: int, dtype: Any, first: int, most: int):
        self.first = first
        self.counts: np.ndarray = np.zeros(num_strata, np.int64)
        rows = min(most, RESERVOIR + EXTREMES + _SLACK)
        # Pages of memory that nothing is written to take no room.
        self._arrays = (
            np.empty(rows, np.uint32),
            np.empty((rows, num_sinks), dtype),
            np.empty(rows, dtype),
            np.empty(rows, np.int32),
            np.empty(rows, np.float32),
        )
        self._held = 0
        self._bound = -np.inf  # Of the slowest `EXTREMES` so far.

    @property
    def drawn(self) -> int:
        return int(self.counts.sum())

    def add(self, ids: Any, ends: Any, score: Any, stratum: Any, likelihood: Any) -> None:
        """Adds a batch of samples, in the order of ids."""
        self.counts += np.bincount(stratum, minlength=len(self.counts))
        for start in range(0, len(ids), _SLACK):
            some = slice(start, start + _SLACK)
            self._add(tuple(x[some] for x in (ids, ends, score, stratum, likelihood)))

    def _add(self, batch: tuple[np.ndarray, ...]) -> None:
        ids, _, score, *_ = batch
        if ids[-1] - self.first >= RESERVOIR:
            keep = np.flatnonzero((ids - self.first < RESERVOIR) | (score >= self._bound))
            batch = tuple(x[keep] for x in batch)
        if self._held + len(batch[0]) > len(self._arrays[0]):
            self._forget()
        rows = slice(self._held, self._held + len(batch[0]))
        for array, x in zip(self._arrays, batch, strict=True):
            array[rows] = x
        self._held = rows.stop

    def _forget(self) -> None:
        score = self._arrays[2][: self._held]
        slow = np.argpartition(score, -EXTREMES)[-EXTREMES:]
        self._bound = score[slow].min()
        later = np.sort(slow[slow >= RESERVOIR])  # The early samples lie in front, and stay.
        for array in self._arrays:
            array[RESERVOIR : RESERVOIR + len(later)] = array[later]
        self._held = RESERVOIR + len(later)

    def replicas(self) -> Replicas:
        """The samples that were kept."""
        kept = (array[: self._held] for array in self._arrays)
        return Replicas(*kept, counts=self.counts, first=self.first)
