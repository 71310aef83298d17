"""Which stage and microbatch ops are of that run on a rank with several stages, where their names
do not say: the schedule has their order.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from .._misc import counted
from ..schedule import AbstractSchedule, parse_token
from ._ops import LETTERS, PIPELINED, TRANSFERS
from ._rank_op import RankOp


def numbered(
    ops: Sequence[RankOp],
    rank: int,
    schedule: AbstractSchedule | None,
    num_microbatches: int,
    path: str,
) -> Iterator[RankOp]:
    """The ops of one rank with their stages.

    **Arguments:**

    - `ops`: of one rank; of some the stage is -1.
    - `rank`: its pipeline rank.
    - `schedule`: what the job states.
    - `num_microbatches`: in a step.
    - `path`: for messages.

    **Raises:**

    `ValueError` where a step has more ops of a kind than microbatches, and no schedule is stated.
    """
    seen: dict[tuple[int, str], int] = {}
    for op in sorted(ops, key=lambda op: op.start):
        if op.op not in PIPELINED:
            yield dataclasses.replace(op, stage=0)
        elif op.stage >= 0:
            yield op
        elif schedule is None or schedule.num_stages == schedule.num_ranks:
            yield dataclasses.replace(op, stage=rank)
        else:
            number = seen.get((op.step, op.op), 0)
            seen[op.step, op.op] = number + 1
            places = _places(op.op, rank, schedule)
            if number < len(places):  # What is too many is no op of this schedule.
                stage, microbatch = places[number]
                yield dataclasses.replace(op, stage=stage, microbatch=microbatch)
    if schedule is None:
        _check_number(ops, num_microbatches, path)


def _places(op: str, rank: int, schedule: AbstractSchedule) -> list[tuple[int, int]]:
    """Stages and microbatches of a kind of op on a rank, in the order in which it runs them."""
    forward = op.startswith("forward")
    letters = ("F" if forward else "BI") if op in TRANSFERS else LETTERS[op]
    found = []
    for token in schedule.orders()[rank]:
        letter, stage, microbatch, *_ = parse_token(token, rank, 0)
        other = stage + TRANSFERS.get(op, 0)
        at = schedule.stage_to_rank[other] if 0 <= other < schedule.num_stages else rank
        if letter in letters and (op not in TRANSFERS or at != rank):
            found.append((stage, microbatch))
    return found


def _check_number(ops: Sequence[RankOp], num_microbatches: int, path: str) -> None:
    unknown = {op.microbatch for op in ops if op.op in LETTERS and op.stage < 0}
    if unknown and max(unknown) >= num_microbatches:
        number = counted(max(unknown) + 1, "call")
        raise ValueError(
            f"{path}: a step has {number} of an op for {num_microbatches} microbatches, and their "
            "names do not say of which stage; give the schedule that was traced in place of "
            "`traced`."
        )
