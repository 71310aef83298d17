import dataclasses

from ._base import AbstractSchedule, check_enough, check_positive


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, with two stages on each rank: down the ranks, and back up."""
    ranks = tuple(range(num_ranks))
    return ranks + ranks[::-1]


@dataclasses.dataclass(frozen=True)
class AbstractVShape(AbstractSchedule):
    """Abstract base class for schedules with two stages on each rank, placed in a V.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`, so that the first and the last stage share
    a rank.
    """

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 2

    def __post_init__(self) -> None:
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)
        if self.virtual_stages != 2:
            raise ValueError(
                f"`virtual_stages={self.virtual_stages!r}` does not fit `{self.kind}`, which has "
                "two stages on each rank; use 2."
            )
        check_enough(self)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)


AbstractVShape.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank, which must be two.
"""
