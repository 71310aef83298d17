from typing import ClassVar

from ._fill import Op, Pipe, fill_units, twice_backward
from ._two_way import AbstractTwoWay


class Chimera(AbstractTwoWay):
    """Two 1F1B pipelines that run through the same ranks from opposite ends.

    There are two copies of the model: stage `s` of the first is on rank `s`; stage `s` of the
    second, which has the number `num_ranks + s`, is on rank `num_ranks - 1 - s`. Each pipeline
    takes half of the microbatches, numbered from zero in both, in units of `num_ranks / 2`, which
    is also how many it has in flight. Source: Li and Hoefler, 2021. Bubbles between units are
    filled by list scheduling, under the assumption that a backward takes as long as two forwards.
    """

    kind: ClassVar[str] = "chimera"

    def orders(self) -> list[list[str]]:
        p, half = self.num_ranks, self.num_ranks // 2
        pipe = Pipe(self.stage_to_rank, self.chain_starts, twice_backward)
        limits = [min(half, p - rank) + min(half, rank + 1) for rank in range(p)]
        return fill_units(self._in_turns, self.num_microbatches // 2, half, pipe, limits)

    def _in_turns(self, num_microbatches: int) -> list[list[Op]]:
        last = 2 * self.num_ranks - 1
        return [
            [
                (phase, stage, i)
                for i in range(num_microbatches)
                for stage in (rank, last - rank)
                for phase in "FB"
            ]
            for rank in range(self.num_ranks)
        ]
