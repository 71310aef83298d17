import dataclasses
from typing import ClassVar

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class AbstractInterleaved(AbstractSchedule):
    """Abstract base class for schedules that run groups of microbatches through each stage in turn.

    Stage `c * num_ranks + r` is on rank `r`.
    """

    whole_groups = True  # With others, orders can deadlock.

    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    microbatch_group_size: int | None = None

    def __post_init__(self) -> None:
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

    @property
    def group_size(self) -> int:
        """How many microbatches run through a stage before the rank turns to its next stage."""
        return self.microbatch_group_size or self.num_ranks

    def turns(self, rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The stages and microbatches of a rank, in the order of its forwards and backwards."""
        p, m, v, size = self.num_ranks, self.num_microbatches, self.virtual_stages, self.group_size
        turns = [
            (c, i)
            for start in range(0, m, size)
            for c in range(v)
            for i in range(start, min(start + size, m))
        ]
        forwards = [(c * p + rank, i) for c, i in turns]
        return forwards, [((v - 1 - c) * p + rank, i) for c, i in turns]


AbstractInterleaved.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks.
- `num_microbatches`: the number of microbatches in a step.
- `virtual_stages`: the number of stages on each rank.
- `microbatch_group_size`: how many microbatches run through a stage before the rank turns to its
    next stage (Megatron's `microbatch_group_size_per_vp_stage`); the last group may be shorter.
    Default `num_ranks`. PyTorch's `Interleaved1F1B` and `InterleavedZeroBubble` have
    `num_microbatches // max(1, num_microbatches // num_ranks)`.
"""


class InterleavedOneFOneB(AbstractInterleaved):
    """One forward, one backward with several stages per rank, as Megatron-LM interleaves them.

    Stage `c * num_ranks + r` is on rank `r`. A rank runs a group of microbatches through each of
    its stages in turn, then the next group. With `virtual_stages=1` this is *not*
    [`prism_jax.OneFOneB`][]: its warm-up is twice as long.

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`. Megatron-LM refuses all such inputs.
    """

    kind: ClassVar[str] = "interleaved-1f1b"

    def orders(self) -> list[list[str]]:
        p, v = self.num_ranks, self.virtual_stages
        orders = []
        for rank in range(p):
            forwards, backwards = self.turns(rank)
            warmup = 2 * (p - 1 - rank) + (v - 1) * self.group_size
            order = [f"{stage}F{i}" for stage, i in forwards[:warmup]]
            for k, (stage, i) in enumerate(backwards, warmup):
                order += [f"{s}F{j}" for s, j in forwards[k : k + 1]] + [f"{stage}B{i}"]
            orders.append(order)
        return orders


class OverlappedOneFOneB(AbstractInterleaved):
    """[`prism_jax.InterleavedOneFOneB`][] in which the forward of one microbatch and the backward
    of another run as a pair, as with Megatron-Core's `--overlap-moe-expert-parallel-comm`.

    The warm-up has one more forward, so that no backward is paired with a forward that it waits
    for. With one rank and one stage, neighbouring microbatches are paired.

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`.
    """

    kind: ClassVar[str] = "overlapped-1f1b"

    def orders(self) -> list[list[str]]:
        p, v = self.num_ranks, self.virtual_stages
        orders = []
        for rank in range(p):
            forwards, backwards = self.turns(rank)
            warmup = 2 * (p - 1 - rank) + (v - 1) * self.group_size + 1
            order = [f"{stage}F{i}" for stage, i in forwards[:warmup]]
            ahead = [f"{stage}F{i}" for stage, i in forwards[warmup:]]
            back = [f"{stage}B{i}" for stage, i in backwards]
            pairs = [f"({one};{other})OVERLAP_F_B" for one, other in zip(ahead, back, strict=False)]
            orders.append([*order, *pairs, *back[len(pairs) :]])
        return orders


class InterleavedZeroBubble(AbstractInterleaved):
    """Interleaved 1F1B with separate ops for weight gradients, as in PyTorch.

    Its warm-up is shorter than that of [`prism_jax.InterleavedOneFOneB`][] by `p - 1 - r` on rank
    `r` of `p`, and its first `r` weight gradients are deferred. With `virtual_stages=1` it is
    [`prism_jax.ZBH1`][].

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`.
    """

    kind: ClassVar[str] = "interleaved-zero-bubble"

    def orders(self) -> list[list[str]]:
        p, v = self.num_ranks, self.virtual_stages
        orders = []
        for rank in range(p):
            forwards, backwards = self.turns(rank)
            weights = [f"{stage}W{i}" for stage, i in backwards]
            warmup = p - 1 - rank + (v - 1) * self.group_size
            order = [f"{stage}F{i}" for stage, i in forwards[:warmup]]
            for k, (stage, i) in enumerate(backwards):
                ahead = forwards[warmup + k : warmup + k + 1]
                order += [f"{s}F{j}" for s, j in ahead] + [f"{stage}I{i}"]
                order += weights[k - rank : k - rank + 1] if k >= rank else []
            orders.append(order + weights[max(len(weights) - rank, 0) :])
        return orders
