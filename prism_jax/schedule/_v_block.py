"""Building blocks of V-shaped schedules, repeated every six ops: a microbatch's ops on a rank."""

from ._fill import Op, Pipe, Rule, fill
from ._v_shape import v_shape


_PERIOD = 6  # A forward, a backward-input and a backward-weight of two stages.


def unroll_block(
    num_ranks: int, num_microbatches: int, rank: int, offsets: dict[tuple[str, int], int]
) -> list[Op]:
    """The ops of a rank in the order of their times in a repeated block.

    **Arguments:**

    - `num_ranks`, `num_microbatches`: of the schedule.
    - `rank`: whose ops.
    - `offsets`: when, in ops from the forward of the first stage, the phases `F` and `I` of the two
        stages of this rank run; no two of them at one time modulo six. The backward-weights come
        as soon as they find a free time.
    """
    times = dict(offsets)
    for stage in (1, 0):
        time = offsets["I", stage] + 1
        while time % _PERIOD in {taken % _PERIOD for taken in times.values()}:
            time += 1
        times["W", stage] = time
    stages = rank, 2 * num_ranks - 1 - rank
    ops = [
        (time + _PERIOD * i, (phase, stages[stage], i))
        for (phase, stage), time in times.items()
        for i in range(num_microbatches)
    ]
    return [op for _, op in sorted(ops)]


def fill_block(blocks: list[list[Op]]) -> list[list[str]]:
    """Moves ops of a repeated block into the bubbles before and behind it, within its memory."""
    pipe = Pipe(v_shape(len(blocks)), (0,), lambda *_: 1.0)
    most = max(map(_peak, blocks))
    return fill(blocks, pipe, [most] * len(blocks), Rule())


def _peak(order: list[Op]) -> int:
    held = most = 0
    for phase, _, _ in order:
        held += {"F": 1, "I": 0, "W": -1}[phase]
        most = max(most, held)
    return most
