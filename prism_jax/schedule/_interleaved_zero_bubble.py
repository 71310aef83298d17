import dataclasses

from ._base import AbstractSchedule, check_positive
from ._turns import turns


@dataclasses.dataclass(frozen=True)
class InterleavedZeroBubble(AbstractSchedule):
    """Interleaved 1F1B whose weight gradients run on their own, as in PyTorch.

    Its warm-up is shorter than that of [`prism_jax.InterleavedOneFOneB`][] by `p - 1 - r` on rank
    `r` of `p`, and the first `r` weight gradients are put off. With `virtual_stages=1` it is
    [`prism_jax.ZBH1`][].

    !!! note

        Where the last group is short of `num_ranks` microbatches the orders can deadlock, which
        `op_graph` and `evaluate` report.
    """

    kind = "interleaved-zero-bubble"

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
            backwards = [((v - 1 - c) * p + rank, i) for c, i in order_of_turns]
            weights = [f"{stage}W{i}" for stage, i in backwards]
            warmup = min(m * v, p - 1 - rank + (v - 1) * group_size)
            order = forwards[:warmup]
            for k, (stage, i) in enumerate(backwards):
                order += [*forwards[warmup + k : warmup + k + 1], f"{stage}I{i}"]
                order += weights[k - rank : k - rank + 1] if k >= rank else []
            orders.append(order + weights[max(m * v - rank, 0) :])
        return orders


InterleavedZeroBubble.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank.
- `microbatch_group_size`: how many microbatches run through a stage before the rank turns to its
    next stage. Default `num_ranks`. PyTorch's `InterleavedZeroBubble` has
    `num_microbatches // max(1, num_microbatches // num_ranks)`.
"""
