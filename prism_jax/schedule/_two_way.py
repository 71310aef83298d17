"""Pipelines of whole models from opposite ends of the ranks, and such a pair cut in half."""

import itertools as it
from collections import deque
from typing import ClassVar

from ._base import AbstractCounted, described
from ._fill import Pipe, fill_units
from ._v_shape import AbstractVShape, v_shape


@described
class AbstractTwoWay(AbstractCounted):
    """Abstract base class for two pipelines of whole models from opposite ends of the ranks.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks, which must be even.
    - `num_microbatches`: the number of microbatches in a step, in both directions together, which
        must be even.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_ranks % 2 or self.num_microbatches % 2:
            raise ValueError(
                f"`{self.kind}` has `num_ranks={self.num_ranks}` and "
                f"`num_microbatches={self.num_microbatches}`; use even numbers."
            )
        self._check_enough()

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)

    @property
    def chain_starts(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0, self.num_ranks


class Chimera(AbstractTwoWay):
    """Two 1F1B pipelines that run through the same ranks from opposite ends.

    There are two copies of the model: stage `s` of the first is on rank `s`; stage `s` of the
    second, which has the number `num_ranks + s`, is on rank `num_ranks - 1 - s`. Each pipeline
    takes half of the microbatches, numbered from zero in both, in units of `num_ranks / 2`, which
    is also how many it has in flight. Source: Li and Hoefler, 2021. Bubbles between units are
    filled by list scheduling, under the assumption that a backward takes as long as two forwards.
    """

    kind: ClassVar[str] = "chimera"

    def orders(self) -> list[list[str]]:
        p, num_halves = self.num_ranks, self.num_ranks // 2

        def in_turns(microbatches: range) -> list[list[str]]:
            return [
                [f"{s}{x}{i}" for i in microbatches for s in (rank, 2 * p - 1 - rank) for x in "FB"]
                for rank in range(p)
            ]

        pipe = Pipe(self.stage_to_rank, self.chain_starts)
        limits = [min(num_halves, p - rank) + min(num_halves, rank + 1) for rank in range(p)]
        return fill_units(in_turns, self.num_microbatches // 2, num_halves, pipe, limits)


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

    def _order(self, rank: int) -> list[str]:
        p, stages = self.num_ranks, (rank, 2 * self.num_ranks - 1 - rank)
        near_and_far = stages if rank < p // 2 else (stages[1], stages[0])
        from_end = min(rank, p - 1 - rank)
        return _dual_pipe_order(p // 2, from_end, self.num_microbatches // 2, near_and_far)


class DualPipeV(AbstractVShape):
    """DualPipe cut in half: a V-shaped placement makes one pipeline of both directions, without a
    second copy of the weights.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`. In the steady state, the forward of one
    stage and the backward of the other run as one op, so that each hides the communication of the
    other. There must be at least twice as many microbatches as ranks.
    """

    kind: ClassVar[str] = "dual-pipe-v"
    microbatches_per_rank = 2

    def _order(self, rank: int) -> list[str]:
        p, m = self.num_ranks, self.num_microbatches
        return _dual_pipe_order(p, rank, m, (rank, 2 * p - 1 - rank))


def _dual_pipe_order(
    num_ranks: int, rank: int, num_microbatches: int, stages: tuple[int, int]
) -> list[str]:
    """The tokens of one rank, as in the public code of DeepSeek's DualPipe.

    **Arguments:**

    - `num_ranks`: how many ranks there are from an end of the pipeline to where it turns.
    - `rank`: how far this rank is from that end, from zero.
    - `num_microbatches`: the number of microbatches in each direction.
    - `stages`: the two stages of the rank: first that of the direction that enters at the near end,
        then the other.
    """
    forwards, backwards = ((it.count(), it.count()) for _ in "FB")
    put_off: deque[str] = deque()
    order: list[str] = []

    def forward(c: int) -> str:
        return f"{stages[c]}F{next(forwards[c])}"

    def backward(c: int, split: bool = False) -> str:
        microbatch = next(backwards[c])
        if split:
            put_off.append(f"{stages[c]}W{microbatch}")
        return f"{stages[c]}{'I' if split else 'B'}{microbatch}"

    def pair_of(c: int) -> str:
        return f"({forward(c)};{backward(1 - c)})OVERLAP_F_B"

    to_turn = num_ranks - 1 - rank
    order += [forward(0) for _ in range(2 * to_turn)]
    for _ in range(rank + 1):
        order += [forward(0), forward(1)]
    for _ in range(to_turn):
        order += [backward(1, split=True), put_off.popleft(), forward(1)]
    for i in range(num_microbatches - 2 * num_ranks + rank + 1):
        # Where the pipe turns, the first backward needs the end of this very forward.
        order += [forward(0), backward(1)] if i == 0 and to_turn == 0 else [pair_of(0)]
        order.append(pair_of(1))
    for _ in range(to_turn):
        order += [backward(1), pair_of(1)]
    for i in range(rank + 1):
        # In the second half, weight gradients are put off.
        order.append(backward(1, split=2 * i > rank))
        order.append(backward(0, split=2 * i >= rank))
    for _ in range(to_turn):
        order += [put_off.popleft(), backward(0, split=True)]
    return order + list(put_off)
