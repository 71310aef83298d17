import dataclasses

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class AbstractOneStage(AbstractSchedule):
    """Abstract base class for schedules with one stage on each rank."""

    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))


AbstractOneStage.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is the number of stages.
- `num_microbatches`: the number of microbatches in a step.
"""
