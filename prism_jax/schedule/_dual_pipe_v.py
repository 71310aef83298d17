import dataclasses

from ._base import AbstractSchedule
from ._dual_pipe_order import dual_pipe_order
from ._v_shape import check_v_shape, v_shape


@dataclasses.dataclass(frozen=True)
class DualPipeV(AbstractSchedule):
    """DualPipe cut in half: both directions are one V, without a second copy of the weights.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`. In the steady state, the forward of one
    and the backward of the other run as one op, so that each hides the communication of the other.
    """

    kind = "dual-pipe-v"

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 2

    def __post_init__(self):
        check_v_shape(self.kind, self.num_ranks, self.num_microbatches, self.virtual_stages)
        if self.num_microbatches < 2 * self.num_ranks:
            raise ValueError(
                f"`num_microbatches={self.num_microbatches}` is too few for `{self.kind}` on "
                f"{self.num_ranks} ranks; use twice as many as ranks, or more."
            )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    def orders(self) -> list[list[str]]:
        p, m = self.num_ranks, self.num_microbatches
        return [dual_pipe_order(p, r, m, (r, 2 * p - 1 - r)) for r in range(p)]


DualPipeV.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step, at least twice as many as ranks.
- `virtual_stages`: the number of stages on each rank, which is two.
"""
