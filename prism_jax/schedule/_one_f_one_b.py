from typing import ClassVar

from ._one_stage import AbstractOneStage


class OneFOneB(AbstractOneStage):
    """One forward, one backward (PipeDream-flush), one stage per rank.

    Rank `r` of `p` runs `p - 1 - r` forwards, then alternates between a forward and a backward,
    then runs the remaining backwards. It has at most `p - r` microbatches in flight.
    """

    kind: ClassVar[str] = "1f1b"
    blocking = True  # As Megatron-LM's, which cannot overlap them.

    def orders(self) -> list[list[str]]:
        p, m = self.num_ranks, self.num_microbatches
        orders = []
        for stage in range(p):
            warmup = min(p - 1 - stage, m)
            order = [f"{stage}F{i}" for i in range(warmup)]
            for i in range(m - warmup):
                order += [f"{stage}F{warmup + i}", f"{stage}B{i}"]
            order += [f"{stage}B{i}" for i in range(m - warmup, m)]
            orders.append(order)
        return orders
