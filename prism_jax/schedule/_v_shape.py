"""Schedules whose stages are placed down the ranks and back up: in a V, or in several waves."""

from typing import ClassVar

from ._base import AbstractCounted, check_positive, described
from ._custom import CustomSchedule
from ._fill import Pipe, fill, fill_units
from ._ops import peak_in_flight


_PERIOD = 6  # A forward, a backward-input and a backward-weight of two stages.


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, with two stages on each rank: down the ranks, and back up."""
    ranks = tuple(range(num_ranks))
    return ranks + ranks[::-1]


@described
class AbstractVShape(AbstractCounted):
    """Abstract base class for schedules with two stages on each rank, placed in a V.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`, so that the first and the last stage share
    a rank.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank, which must be two.
    """

    virtual_stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_stages != 2:
            raise ValueError(
                f"`virtual_stages={self.virtual_stages!r}` does not fit `{self.kind}`, which has "
                "two stages on each rank; use 2."
            )
        self._check_enough()

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks)


class ZBV(AbstractVShape):
    """Zero bubble with two stages on each rank, placed in a V, within the memory of 1F1B.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`, so that the first and the last stage share
    a rank. A rank holds the activations of at most `2 p` (stage, microbatch) pairs. The order is
    made for at least `2 p - 1` microbatches; with fewer, the ops of the missing microbatches are
    left out. It is the same as PyTorch's `ZBVZeroBubble`.
    """

    kind: ClassVar[str] = "zbv"

    def _order(self, rank: int) -> list[str]:
        p, m = self.num_ranks, self.num_microbatches
        most = max(m, 2 * p - 1)
        stages = rank, 2 * p - 1 - rank
        done = dict.fromkeys(((phase, c) for phase in "FIW" for c in (0, 1)), 0)
        order: list[str] = []

        def run(*ops: tuple[str, int]) -> None:
            for phase, c in ops:
                if done[phase, c] < m:
                    order.append(f"{stages[c]}{phase}{done[phase, c]}")
                done[phase, c] += 1

        run(*[("F", 0)] * (2 * (p - rank) - 1))
        run(*[("F", 1), ("F", 0)] * rank)
        run(*[("F", 1), ("I", 1), ("W", 1)] * (p - rank))
        while done["F", 1] < most:
            run(*[("F", 0)] * (done["F", 0] < most))
            run(("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
        run(*[("I", 0), ("I", 1)] * rank)
        run(*[("I", 0), ("W", 0)] * (p - rank))
        for c in (1, 0):
            run(*[("W", c)] * (most - done["W", c]))
        return order


class VHalf(AbstractVShape):
    """Two stages on each rank, placed in a V, with about half of the activation memory of 1F1B.

    A rank holds the activations of at most `num_ranks + 2` (stage, microbatch) pairs
    (`num_ranks + 3` if `num_ranks` is even), compared with `2 num_ranks` for [`prism_jax.ZBV`][].
    The order does not depend on costs. V-Half of Qi et al., 2024.
    """

    kind: ClassVar[str] = "v-half"

    def orders(self) -> list[list[str]]:
        # On its way down a microbatch takes two ops to the next rank, on its way up one.
        back = 3 * self.num_ranks + (2 if self.num_ranks % 2 == 0 else 5)
        return _repeat(self, there_and_back=3, back=back, pause=1)


class VMin(AbstractVShape):
    """Two stages on each rank, placed in a V, with about a third of the activation memory of 1F1B.

    This is the least memory that a repeated block of ops can have. The order does not depend on
    costs; if the costs of ops are far from equal, the bubbles grow with the number of microbatches.
    V-Min of Qi et al., 2024.
    """

    kind: ClassVar[str] = "v-min"

    def orders(self) -> list[list[str]]:
        # A microbatch takes one op to the next rank, down and up; its backward must not come back
        # at the time of a forward of another one.
        back = 2 * self.num_ranks + (2 if self.num_ranks % 3 == 0 else 0)
        return _repeat(self, there_and_back=2, back=back, pause=0)


def _repeat(
    schedule: AbstractVShape, *, there_and_back: int, back: int, pause: int
) -> list[list[str]]:
    """The orders of a block of six ops that is repeated for each microbatch.

    Ops are then moved into the bubbles before and after the blocks, within their memory.

    **Arguments:**

    - `schedule`: gives the numbers of ranks and microbatches.
    - `there_and_back`: how many ops a microbatch takes from a rank to the next rank and back.
    - `back`: how many ops after its first forward on a rank its first backward runs there.
    - `pause`: for how many ops the backward waits where the V turns.
    """
    num_ranks = schedule.num_ranks
    blocks = []
    for rank in range(num_ranks):
        turn = there_and_back * (num_ranks - 1 - rank) + 1
        times = {("F", 0): 0, ("F", 1): turn, ("I", 1): back, ("I", 0): back + turn + pause}
        # The backward-weights come as soon as they find a free time.
        for c in (1, 0):
            time = times["I", c] + 1
            while time % _PERIOD in {taken % _PERIOD for taken in times.values()}:
                time += 1
            times["W", c] = time
        stages = rank, 2 * num_ranks - 1 - rank
        ops = [
            (time + _PERIOD * i, f"{stages[c]}{phase}{i}")
            for (phase, c), time in times.items()
            for i in range(schedule.num_microbatches)
        ]
        blocks.append([token for _, token in sorted(ops)])
    places = schedule.stage_to_rank
    most = int(peak_in_flight(CustomSchedule(blocks, places)).max())
    return fill(blocks, Pipe(places, cost=lambda *_: 1.0), [most] * num_ranks)


@described
class Hanayo(AbstractCounted):
    """Wave-like pipelines: the stages run down the ranks and back up, once or several times.

    With `virtual_stages = 2 w` there are `w` waves, without a second copy of the weights. A rank
    runs the op that is ready of the earliest microbatch, in units of `num_ranks` microbatches, and
    holds at most `num_ranks` microbatches of each of its stages. Source: Liu et al., 2023. The
    orders here are found by list scheduling, under the assumption that a backward takes as long as
    two forwards.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank: two for each wave.
    """

    kind: ClassVar[str] = "hanayo"

    virtual_stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(virtual_stages=self.virtual_stages)
        if self.virtual_stages % 2:
            raise ValueError(
                f"`virtual_stages={self.virtual_stages}` does not fit `{self.kind}`, which has two "
                "stages of each wave on a rank; use an even number."
            )

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return v_shape(self.num_ranks) * (self.virtual_stages // 2)

    def orders(self) -> list[list[str]]:
        p, places = self.num_ranks, self.stage_to_rank
        held = [[stage for stage, rank in enumerate(places) if rank == r] for r in range(p)]

        def one_by_one(microbatches: range) -> list[list[str]]:
            passes = [[f"{s}F" for s in own] + [f"{s}B" for s in reversed(own)] for own in held]
            return [[f"{op}{i}" for i in microbatches for op in ops] for ops in passes]

        limits = [p * self.virtual_stages] * p
        return fill_units(one_by_one, self.num_microbatches, p, Pipe(places), limits)
