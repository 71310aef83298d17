import dataclasses
from typing import ClassVar

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class LoopedBFS(AbstractSchedule):
    """Breadth-first: a rank runs all microbatches through one of its stages, then through the next.

    Stage `c * num_ranks + r` is on rank `r`. The backwards run in reverse order of stages, and of
    microbatches in each stage.
    """

    kind: ClassVar[str] = "looped-bfs"

    num_ranks: int
    num_microbatches: int
    virtual_stages: int

    def __post_init__(self) -> None:
        check_positive(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks)) * self.virtual_stages

    def orders(self) -> list[list[str]]:
        orders = []
        for rank in range(self.num_ranks):
            stages = range(rank, self.num_stages, self.num_ranks)
            microbatches = range(self.num_microbatches)
            forwards = [f"{stage}F{m}" for stage in stages for m in microbatches]
            backwards = [f"{s}B{m}" for s in reversed(stages) for m in reversed(microbatches)]
            orders.append(forwards + backwards)
        return orders


LoopedBFS.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank.
"""
