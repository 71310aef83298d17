import dataclasses
from typing import ClassVar

from ._base import AbstractSchedule, check_positive
from ._fill import Op, Pipe, fill_units, twice_backward


@dataclasses.dataclass(frozen=True)
class Hanayo(AbstractSchedule):
    """Wave-like pipelines: the stages run down the ranks and back up, once or several times.

    With `virtual_stages = 2 w` there are `w` waves, without a second copy of the weights. A rank
    runs the op that is ready of the earliest microbatch, in units of `num_ranks` microbatches, and
    holds at most `num_ranks` microbatches of each of its stages. Source: Liu et al., 2023. The
    orders here are found by list scheduling, under the assumption that a backward takes as long as
    two forwards.
    """

    kind: ClassVar[str] = "hanayo"

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 2

    def __post_init__(self) -> None:
        check_positive(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )
        if self.virtual_stages % 2:
            raise ValueError(
                f"`virtual_stages={self.virtual_stages}` does not fit `{self.kind}`, which has two "
                "stages of each wave on a rank; use an even number."
            )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        down = tuple(range(self.num_ranks))
        return (down + down[::-1]) * (self.virtual_stages // 2)

    def orders(self) -> list[list[str]]:
        p, places = self.num_ranks, self.stage_to_rank
        pipe = Pipe(places, (0,), twice_backward)
        limits = [p * self.virtual_stages] * p
        return fill_units(self._one_by_one, self.num_microbatches, p, pipe, limits)

    def _one_by_one(self, num_microbatches: int) -> list[list[Op]]:
        p, places = self.num_ranks, self.stage_to_rank
        held = [[stage for stage, rank in enumerate(places) if rank == r] for r in range(p)]
        passes = [
            [("F", stage) for stage in stages] + [("B", stage) for stage in reversed(stages)]
            for stages in held
        ]
        return [[(*op, i) for i in range(num_microbatches) for op in ops] for ops in passes]


Hanayo.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank: two for each wave.
"""
