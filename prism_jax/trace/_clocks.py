"""Clocks of ranks, set by collectives: everyone leaves one together."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ._collective_names import TOGETHER
from ._rank_ops import RankOps


# What leaving in another order can explain, in scatters of the difference of two ends.
_BY_CHANCE = 2.0


@dataclasses.dataclass(frozen=True)
class Clocks:
    """How far the clocks of ranks are apart.

    **Attributes:**

    - `offsets`: of each rank, nanoseconds to add to its times.
    - `seen`: of each rank, what its clock was found to be ahead of the first one's by.
    - `scatter_ns`: the robust standard deviation of what remains, over all collectives.
    - `matched`: how many collectives were matched.
    - `unknown`: ranks that share none with the others.
    """

    offsets: dict[int, int]
    seen: dict[int, int]
    scatter_ns: float
    matched: int
    unknown: tuple[int, ...]


def set_clocks(ranks: Sequence[RankOps]) -> Clocks:
    """Finds how far clocks are apart: the median difference of the ends of what two ranks ran
    together. A difference within twice the scatter of those is left, for it may be the order in
    which ranks leave.

    **Arguments:**

    - `ranks`: of one job.
    """
    first = min(ranks, key=lambda r: r.rank)
    seen, offsets, scatters = {first.rank: 0}, {first.rank: 0}, []
    matched: set = set()
    waiting = [first]
    while waiting:
        one = waiting.pop()
        for other in ranks:
            if other.rank in seen:
                continue
            both = [
                key
                for key in other.collectives
                if key in one.collectives and key[0].name in TOGETHER
            ]
            if not both:
                continue
            apart = np.array([other.collectives[k][1] - one.collectives[k][1] for k in both])
            median = float(np.median(apart))
            scatter = 1.4826 * float(np.median(np.abs(apart - median)))
            ahead = median if abs(median) > _BY_CHANCE * scatter else 0.0
            seen[other.rank] = seen[one.rank] + round(median)
            offsets[other.rank] = offsets[one.rank] - round(ahead)
            scatters.append(scatter)
            matched.update(both)
            waiting.append(other)
    unknown = tuple(sorted(r.rank for r in ranks if r.rank not in seen))
    offsets |= dict.fromkeys(unknown, 0)
    return Clocks(offsets, seen, max(scatters, default=0.0), len(matched), unknown)
