"""Synchronises the clocks of ranks by collectives, which all ranks leave together."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from ._rank_ops import RankOps


# The largest difference, in scatters of two ends, that the order of leaving can explain.
_BY_CHANCE = 2.0
# All members leave these at the same time.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The offsets between the clocks of ranks.

    **Attributes:**

    - `offsets`: for each rank, the nanoseconds to add to its times.
    - `seen`: for each rank, by how much its clock was found to be ahead of that of the first rank.
    - `scatter_ns`: the robust standard deviation of the remaining differences, over all
        collectives.
    - `matched`: how many collectives were matched.
    - `unknown`: ranks that have no collective in common with the others.
    """

    offsets: dict[int, int]
    seen: dict[int, int]
    scatter_ns: float
    matched: int
    unknown: tuple[int, ...]


def set_clocks(ranks: Sequence[RankOps]) -> Clocks:
    """Finds the offsets between clocks: the median difference between the ends of the collectives
    that two ranks of a job ran together. A difference within twice their scatter is not corrected,
    because it may be the order in which ranks leave; neither is a difference between two ranks of
    one host.
    """
    first = min(ranks, key=lambda r: r.rank)
    seen, offsets, scatters = {first.rank: 0}, {first.rank: 0}, []
    matched: set = set()
    waiting = [first]
    while waiting:
        one = waiting.pop()
        for other in ranks:
            both = _together(one, other)
            alike = one.host == other.host != ""
            if other.rank in seen or not (both or alike):
                continue
            apart = np.array([other.collectives[k][1] - one.collectives[k][1] for k in both] or [0])
            median = float(np.median(apart))
            scatter = 1.4826 * float(np.median(np.abs(apart - median)))
            is_apart = not alike and abs(median) > _BY_CHANCE * scatter
            seen[other.rank] = seen[one.rank] + round(median)
            offsets[other.rank] = offsets[one.rank] - (round(median) if is_apart else 0)
            scatters.append(scatter)
            matched.update(both)
            waiting.append(other)
    unknown = tuple(sorted(r.rank for r in ranks if r.rank not in seen))
    offsets |= dict.fromkeys(unknown, 0)
    return Clocks(offsets, seen, max(scatters, default=0.0), len(matched), unknown)


def _together(one: RankOps, other: RankOps) -> list:
    """The collectives that both ranks ran together. If groups are not known, these are the kinds
    that both ran equally often, because others may belong to different groups.
    """
    both = [k for k in other.collectives if k in one.collectives and k[0].name in _TOGETHER]
    calls = [collections.Counter(message for message, _ in r.collectives) for r in (one, other)]
    return [k for k in both if k[0].group or calls[0][k[0]] == calls[1][k[0]]]
