import dataclasses

from ._base import AbstractSchedule, check_enough, check_positive
from ._v_shape import v_shape


@dataclasses.dataclass(frozen=True)
class AbstractTwoWay(AbstractSchedule):
    """Abstract base class for two pipelines of whole models from opposite ends of the ranks."""

    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)
        if self.num_ranks % 2 or self.num_microbatches % 2:
            raise ValueError(
                f"`{self.kind}` has `num_ranks={self.num_ranks}` and "
                f"`num_microbatches={self.num_microbatches}`; use even numbers."
            )
        check_enough(self)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    @property
    def chain_starts(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0, self.num_ranks


AbstractTwoWay.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which must be even.
- `num_microbatches`: the number of microbatches in a step, in both directions together, which must
    be even.
"""
