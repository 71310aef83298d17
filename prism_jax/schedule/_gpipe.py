import dataclasses

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class GPipe(AbstractSchedule):
    """All forwards, then all backwards, one stage per rank.

    The backwards run in the order of the forwards, as in PyTorch. (The paper reverses them, which
    gives the same makespan when all microbatches cost the same.)
    """

    kind = "gpipe"

    num_ranks: int
    num_microbatches: int

    def __post_init__(self):
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    def orders(self) -> list[list[str]]:
        microbatches = range(self.num_microbatches)
        return [
            [f"{stage}F{m}" for m in microbatches] + [f"{stage}B{m}" for m in microbatches]
            for stage in range(self.num_ranks)
        ]


GPipe.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is the number of stages.
- `num_microbatches`: the number of microbatches in a step.
"""
