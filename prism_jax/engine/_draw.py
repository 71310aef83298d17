"""Draws the samples of the chunks of a run."""

import dataclasses
import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..replica import Lead
from ..step import Reservoir
from ._prepare import Run


if TYPE_CHECKING:
    from ._sampling import AbstractSampling

Advance = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the samples of one chunk of a run are drawn.

    **Attributes:**

    - `sampling`: the way that they are drawn in.
    - `first`, `steps`: the first step of the chunk, and its number of steps.
    - `number`: of the chunk.
    """

    sampling: "AbstractSampling"
    first: int
    steps: int
    number: int = 0

    @property
    def lead(self) -> Lead | None:
        """The leading axes."""
        return self.sampling.lead

    @property
    def replicas(self) -> int:
        """How many samples are drawn."""
        return self.sampling.replicas(self.steps)


def all_draws(run: Run, num_samples: int) -> list[Draws]:
    """The draws of the chunks of a run whose sampling has been chosen.

    A chunk keeps all of its samples, so that longer runs make the whole law more accurate. With
    more replicas, chunks are longer, to reach far enough into the tail; only the first and the
    slowest samples are then kept.
    """
    assert run.sampling is not None
    number = run.sampling.chunks(run.program, num_samples)
    ends = [num_samples * i // number for i in range(number + 1)]
    return [
        Draws(run.sampling, first, last - first, i)
        for i, (first, last) in enumerate(it.pairwise(ends))
    ]


def reservoirs(
    run: Run, draws: Sequence[Draws], advance: Advance
) -> Iterator[tuple[Draws, Reservoir, bool]]:
    """Draws the samples of chunks, each into a reservoir, and returns whether Ctrl-C cut it
    short; then it is the last.
    """
    pieces = draws[0].sampling.samples(run, draws)
    for mine in draws:
        of_strata, sinks = len(run.program.strata), run.program.sinks.number
        reservoir = Reservoir(sinks, of_strata, run.plan.dtype, mine.first, mine.replicas)
        try:
            while reservoir.drawn < mine.replicas:
                piece = next(pieces)
                reservoir.add(*piece)
                advance(len(piece[0]) * mine.steps // mine.replicas)
        except KeyboardInterrupt:
            yield mine, reservoir, True
            return
        yield mine, reservoir, False


def parts(ends: np.ndarray, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Splits a range of positions in consecutive chunks: the number of each chunk, and the
    range in it.

    **Arguments:**

    - `ends`: where each chunk ends.
    """
    last = first + count
    for k in range(int(np.searchsorted(ends, first, "right")), len(ends)):
        begin = int(ends[k - 1]) if k else 0
        if begin >= last:
            return
        yield k, max(first, begin) - begin, min(last, int(ends[k])) - begin
