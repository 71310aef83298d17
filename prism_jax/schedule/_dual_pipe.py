import dataclasses

from ._base import AbstractSchedule, check_positive
from ._dual_pipe_order import dual_pipe_order
from ._v_shape import v_shape


@dataclasses.dataclass(frozen=True)
class DualPipe(AbstractSchedule):
    """Two pipes through the same ranks from both ends, whose forwards and backwards overlap.

    Each rank holds two stages, and so the model is there twice: stage `s` of the first pipe on rank
    `s`, and stage `s` of the second, which has the number `num_ranks + s`, on rank
    `num_ranks - 1 - s`. Each pipe takes half of the microbatches, numbered from zero in both.
    DeepSeek-V3, 2024.
    """

    kind = "dual-pipe"

    num_ranks: int
    num_microbatches: int

    def __post_init__(self):
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)
        if self.num_ranks % 2 or self.num_microbatches % 2:
            raise ValueError(
                f"`{self.kind}` has `num_ranks={self.num_ranks}` and "
                f"`num_microbatches={self.num_microbatches}`; use even numbers."
            )
        if self.num_microbatches < 2 * self.num_ranks:
            raise ValueError(
                f"`num_microbatches={self.num_microbatches}` is too few for `{self.kind}` on "
                f"{self.num_ranks} ranks; use twice as many as ranks, or more."
            )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    @property
    def chain_starts(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0, self.num_ranks

    def orders(self) -> list[list[str]]:
        p, half = self.num_ranks, self.num_microbatches // 2
        orders = []
        for rank in range(p):
            first, second = rank, 2 * p - 1 - rank
            near_and_far = (first, second) if rank < p // 2 else (second, first)
            orders.append(dual_pipe_order(p // 2, min(rank, p - 1 - rank), half, near_and_far))
        return orders


DualPipe.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is even.
- `num_microbatches`: the number of microbatches in a step of both directions together, which is
    even, and at least twice the number of ranks.
"""
