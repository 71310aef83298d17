import dataclasses

from ._base import AbstractSchedule, check_positive
from ._fill import Op, Pipe, fill_units, twice_backward
from ._v_shape import v_shape


@dataclasses.dataclass(frozen=True)
class Chimera(AbstractSchedule):
    """Two pipes of 1F1B through the same ranks from both ends.

    Each rank holds two stages, and so the model is there twice: stage `s` of the first pipe on rank
    `s`, and stage `s` of the second, which has the number `num_ranks + s`, on rank
    `num_ranks - 1 - s`. Each pipe takes half of the microbatches, numbered from zero in both, in
    units of `num_ranks / 2`, which is how many it has in flight. Li and Hoefler, 2021; between
    units, bubbles are filled by list scheduling, with a backward that takes two forwards.
    """

    kind = "chimera"

    num_ranks: int
    num_microbatches: int

    def __post_init__(self):
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)
        if self.num_ranks % 2 or self.num_microbatches % 2:
            raise ValueError(
                f"`{self.kind}` has `num_ranks={self.num_ranks}` and "
                f"`num_microbatches={self.num_microbatches}`; use even numbers."
            )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    @property
    def chain_starts(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0, self.num_ranks

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


Chimera.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is even.
- `num_microbatches`: the number of microbatches in a step of both directions together, which is
    even.
"""
