import dataclasses

from ._base import AbstractSchedule, check_positive
from ._turns import turns


@dataclasses.dataclass(frozen=True)
class InterleavedOneFOneB(AbstractSchedule):
    """One forward, one backward with several stages per rank, as Megatron-LM interleaves them.

    Stage `c * num_ranks + r` is on rank `r`. A rank takes the microbatches in groups, and runs a
    whole group through each of its stages in turn. With `virtual_stages=1` this is *not*
    [`prism_jax.OneFOneB`][]: its warm-up is twice as long.

    !!! note

        Where the last group is short of `num_ranks` microbatches the orders can deadlock, which
        `op_graph` and `evaluate` report. Megatron-LM refuses all such inputs.
    """

    kind = "interleaved-1f1b"

    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    microbatch_group_size: int | None = None

    def __post_init__(self):
        check_positive(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            virtual_stages=self.virtual_stages,
        )
        if self.microbatch_group_size is not None:
            check_positive(microbatch_group_size=self.microbatch_group_size)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks)) * self.virtual_stages

    def orders(self) -> list[list[str]]:
        p, m, v = self.num_ranks, self.num_microbatches, self.virtual_stages
        group_size = p if self.microbatch_group_size is None else self.microbatch_group_size
        order_of_turns = turns(m, v, group_size)
        orders = []
        for rank in range(p):
            forwards = [f"{c * p + rank}F{i}" for c, i in order_of_turns]
            backwards = [f"{(v - 1 - c) * p + rank}B{i}" for c, i in order_of_turns]
            warmup = min(m * v, 2 * (p - 1 - rank) + (v - 1) * group_size)
            order = forwards[:warmup]
            for forward, backward in zip(forwards[warmup:], backwards, strict=False):
                order += [forward, backward]
            orders.append(order + backwards[m * v - warmup :])
        return orders


InterleavedOneFOneB.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank.
- `microbatch_group_size`: how many microbatches run through a stage before the rank turns to its
    next stage (Megatron's `microbatch_group_size_per_vp_stage`); the last group may be shorter.
    Default `num_ranks`. PyTorch's `Interleaved1F1B` has
    `num_microbatches // max(1, num_microbatches // num_ranks)`.
"""
