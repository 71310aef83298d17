"""The stage and microbatch of each op on a rank with several stages, from the order in the schedule
if names do not give them.
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

    - `ops`: the ops of one rank, some of which have the stage -1.
    - `rank`: the pipeline rank.
    - `schedule`: the schedule that the job gives, if any.
    - `num_microbatches`: the number of microbatches in a step.
    - `path`: a path for messages.

    **Raises:**

    `ValueError` if a step has more ops of a kind than microbatches, and no schedule is given.
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
            if number < len(places):  # Further ops are not part of this schedule.
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
            f"{path}: a step has {number} ops of a kind for {num_microbatches} microbatches, and "
            "their names do not give their stages; give the schedule that was traced in place of "
            "`traced`."
        )
