from typing import ClassVar

from ._fill import Op, Pipe, fill_units, twice_backward
from ._two_way import AbstractTwoWay


class Chimera(AbstractTwoWay):
    """Two pipes of 1F1B through the same ranks from both ends.

    The model is there twice: stage `s` of the first pipe is on rank `s`, and stage `s` of the
    second, which has the number `num_ranks + s`, on rank `num_ranks - 1 - s`. Each pipe takes half
    of the microbatches, numbered from zero in both, in units of `num_ranks / 2`, which is how many
    it has in flight. Li and Hoefler, 2021; between units, bubbles are filled by list scheduling,
    with a backward that takes two forwards.
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
