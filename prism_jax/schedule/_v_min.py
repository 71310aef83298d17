import dataclasses

from ._base import AbstractSchedule
from ._v_block import fill_block, unroll_block
from ._v_shape import check_v_shape, v_shape


@dataclasses.dataclass(frozen=True)
class VMin(AbstractSchedule):
    """Two stages on each rank, placed in a V, with about a third of the activations of 1F1B.

    The least that a repeated block of ops can do with. The order depends on no costs; where they
    are far from equal, the bubbles grow with the number of microbatches. V-Min of Qi et al., 2024.
    """

    kind = "v-min"

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 2

    def __post_init__(self):
        check_v_shape(self.kind, self.num_ranks, self.num_microbatches, self.virtual_stages)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    def orders(self) -> list[list[str]]:
        p = self.num_ranks
        # A microbatch takes one op to the next rank, down and up; its backward must not come back
        # at the time of a forward of another one.
        back = 2 * p + (2 if p % 3 == 0 else 0)
        blocks = []
        for rank in range(p):
            to_turn = 2 * (p - 1 - rank)
            offsets = {
                ("F", 0): 0,
                ("F", 1): to_turn + 1,
                ("I", 1): back,
                ("I", 0): back + 1 + to_turn,
            }
            blocks.append(unroll_block(p, self.num_microbatches, rank, offsets))
        return fill_block(blocks)


VMin.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank, which is two.
"""
