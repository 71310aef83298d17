"""V-shaped schedules with little memory: a block of six ops is repeated for each microbatch."""

from typing import ClassVar

from ._fill import Op, Pipe, Rule, fill
from ._v_shape import AbstractVShape, v_shape


_PERIOD = 6  # A forward, a backward-input and a backward-weight of two stages.


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
        return _repeat(self.num_ranks, self.num_microbatches, there_and_back=3, back=back, pause=1)


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
        return _repeat(self.num_ranks, self.num_microbatches, there_and_back=2, back=back, pause=0)


def _repeat(
    num_ranks: int, num_microbatches: int, *, there_and_back: int, back: int, pause: int
) -> list[list[str]]:
    """The orders of a block that is repeated for each microbatch.

    Ops are then moved into the bubbles before and after the blocks, within their memory.

    **Arguments:**

    - `num_ranks`, `num_microbatches`: of the schedule.
    - `there_and_back`: how many ops a microbatch takes from a rank to the next rank and back.
    - `back`: how many ops after its first forward on a rank its first backward runs there.
    - `pause`: for how many ops the backward waits where the V turns.
    """
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
            (time + _PERIOD * i, (phase, stages[c], i))
            for (phase, c), time in times.items()
            for i in range(num_microbatches)
        ]
        blocks.append([op for _, op in sorted(ops)])
    pipe = Pipe(v_shape(num_ranks), (0,), lambda *_: 1.0)
    return fill(blocks, pipe, [max(map(_peak, blocks))] * num_ranks, Rule())


def _peak(order: list[Op]) -> int:
    held = most = 0
    for phase, _, _ in order:
        held += {"F": 1, "I": 0, "W": -1}[phase]
        most = max(most, held)
    return most
