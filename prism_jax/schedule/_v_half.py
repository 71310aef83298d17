import dataclasses

from ._base import AbstractSchedule
from ._v_block import fill_block, unroll_block
from ._v_shape import check_v_shape, v_shape


@dataclasses.dataclass(frozen=True)
class VHalf(AbstractSchedule):
    """Two stages on each rank, placed in a V, with about half of the activations of 1F1B.

    At most `num_ranks + 2` microbatches of stages are held on any rank (`num_ranks + 3` where that
    is even), against `2 num_ranks` of [`prism_jax.ZBV`][]. The order depends on no costs. V-Half of
    Qi et al., 2024.
    """

    kind = "v-half"

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
        # On its way down a microbatch takes two ops to the next rank, on its way up one.
        back = 3 * p + (2 if p % 2 == 0 else 5)
        blocks = []
        for rank in range(p):
            to_turn = 3 * (p - 1 - rank)
            offsets = {
                ("F", 0): 0,
                ("F", 1): to_turn + 1,
                ("I", 1): back,
                ("I", 0): back + 2 + to_turn,
            }
            blocks.append(unroll_block(p, self.num_microbatches, rank, offsets))
        return fill_block(blocks)


VHalf.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank, which is two.
"""
