import dataclasses

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class OneFOneB(AbstractSchedule):
    """One forward, one backward (PipeDream-flush), one stage per rank.

    Rank `r` of `p` runs `p - 1 - r` forwards, then a forward and a backward in turn, then the
    backwards that are left. At most `p - r` microbatches are in flight on it.
    """

    kind = "1f1b"
    blocking = True  # As Megatron-LM's, which cannot overlap them.

    num_ranks: int
    num_microbatches: int

    def __post_init__(self):
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

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


OneFOneB.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is the number of stages.
- `num_microbatches`: the number of microbatches in a step.
"""
