from typing import ClassVar

from ._dual_pipe_order import dual_pipe_order
from ._two_way import AbstractTwoWay
from ._v_shape import AbstractVShape


class DualPipe(AbstractTwoWay):
    """Two pipelines that run through the same ranks from opposite ends and overlap their forwards
    and backwards.

    There are two copies of the model: stage `s` of the first is on rank `s`; stage `s` of the
    second, which has the number `num_ranks + s`, is on rank `num_ranks - 1 - s`. Each pipeline
    takes half of the microbatches, numbered from zero in both. There must be at least twice as many
    microbatches as ranks. Source: DeepSeek-V3, 2024.
    """

    kind: ClassVar[str] = "dual-pipe"
    microbatches_per_rank = 2

    def orders(self) -> list[list[str]]:
        p, half = self.num_ranks, self.num_microbatches // 2
        orders = []
        for rank in range(p):
            first, second = rank, 2 * p - 1 - rank
            near_and_far = (first, second) if rank < p // 2 else (second, first)
            orders.append(dual_pipe_order(p // 2, min(rank, p - 1 - rank), half, near_and_far))
        return orders


class DualPipeV(AbstractVShape):
    """DualPipe cut in half: a V-shaped placement makes one pipeline of both directions, without a
    second copy of the weights.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`. In the steady state, the forward of one
    stage and the backward of the other run as one op, so that each hides the communication of the
    other. There must be at least twice as many microbatches as ranks.
    """

    kind: ClassVar[str] = "dual-pipe-v"
    microbatches_per_rank = 2

    def orders(self) -> list[list[str]]:
        p, m = self.num_ranks, self.num_microbatches
        return [dual_pipe_order(p, r, m, (r, 2 * p - 1 - r)) for r in range(p)]
