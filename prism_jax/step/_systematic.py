"""How network regimes and ranks of replicas are distributed over the steps of a run."""

import dataclasses
import functools as ft

import numpy as np

from ..replica import TILE


# An irrational stride, which distributes regimes evenly over any range of steps.
SILVER = np.sqrt(2) - 1
# Ranks are distributed evenly over the steps of a block, the slowest first, so that samples are
# looked up in the order of memory. A block is what a device composes in one batch.
STEP_TILES = 8
BLOCK = STEP_TILES * TILE


@dataclasses.dataclass(frozen=True)
class Systematic:
    """Even distribution of network regimes and replica ranks over the steps of a run.

    **Attributes:**

    - `probabilities`: the probabilities of the network's regimes.
    - `num_steps`: the number of steps.
    - `seed`: two words of the key.
    - `first`: the first id.
    - `shuffled`: whether ranks are in random order, so that they are independent of those of
        others.
    """

    probabilities: np.ndarray
    num_steps: int
    seed: tuple[int, int]
    first: int
    shuffled: bool = False

    @ft.cached_property
    def _offsets(self) -> tuple[float, float]:
        """Where the sequences of ranks and of regimes start, from the key and the first id."""
        ranks, regimes = self.generator(1, 0).random(2)
        return float(ranks), float(regimes)

    def regimes(self, first: int, count: int) -> np.ndarray:
        """The regime of the network in each step, counted from the start of the run."""
        if len(self.probabilities) == 1:
            return np.zeros(count, np.int32)
        uniform = np.modf(np.arange(first, first + count) * SILVER + self._offsets[1])[0]
        bounds = np.cumsum(self.probabilities)[:-1]
        return np.searchsorted(bounds, uniform, "right").astype(np.int32)

    def ranks(self, first: int, count: int) -> np.ndarray:
        """The rank of each step's decisive replica among the replicas, in (0, 1), where 0 is the
        slowest. Of as many equal parts of (0, 1) as the block has steps, each has one rank, in
        ascending order.
        """
        starts = range(first, first + count, BLOCK)
        return np.concatenate([self._ranks_of_block(start) for start in starts])[:count]

    def _ranks_of_block(self, start: int) -> np.ndarray:
        size = min(BLOCK, self.num_steps - start)
        offset = (self._offsets[0] + _reversed(start // BLOCK)) % 1
        order = np.arange(size)
        if self.shuffled:
            order = self.generator(2, start).permutation(size)
        return np.clip((order + offset) / size, 2.0**-53, 1 - 2.0**-53)

    def generator(self, purpose: int, start: int) -> np.random.Generator:
        """A generator of random numbers for the steps from `start` on."""
        counter = [0, 0, purpose, self.first + start]
        return np.random.Generator(np.random.Philox(key=list(self.seed), counter=counter))


def _reversed(number: int) -> float:
    """The radical inverse in base 2: offsets that distribute ranks evenly over blocks as well."""
    return int(f"{number:064b}"[::-1], 2) / 2**64
