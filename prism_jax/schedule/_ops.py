"""The ops of a schedule: the tokens that stand for them, arrays of them, and their parts."""

import functools as ft
import itertools as it
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from .._misc import quoted
from ._base import AbstractSchedule


# A letter of a token, and the phase that it stands for.
PHASES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
OVERLAPPED = "FB"
SEND_RECV = "SR"

# The most digits that an integer of NumPy holds.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_SINGLE = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
# Lines that are not such a token, and what leaves the numbers of those that are.
_NOT_SINGLE = re.compile(f"^(?!{_SINGLE.pattern}$)", re.MULTILINE)
_NO_LETTERS = str.maketrans(dict.fromkeys("FBIW", " "))
_PAIR = re.compile(rf"\({_NUMBER}F{_NUMBER};{_NUMBER}B{_NUMBER}\)OVERLAP_F_B")


class Action(NamedTuple):
    """The contents of a token; `other_*` belong to the backward of an overlapped pair, else -1."""

    phase: str
    stage: int
    microbatch: int
    other_stage: int = -1
    other_microbatch: int = -1

    @property
    def token(self) -> str:
        if self.phase == OVERLAPPED:
            backward = f"{self.other_stage}B{self.other_microbatch}"
            return f"({self.stage}F{self.microbatch};{backward})OVERLAP_F_B"
        return f"{self.stage}{self.phase}{self.microbatch}"


def describe_op(action: Action, rank: int) -> str:
    """How an error names an op of a rank."""
    return f"`{action.token}` (stage {action.stage}, microbatch {action.microbatch}) on rank {rank}"


def parse_token(token: object, rank: int, position: int) -> Action:
    """Reads a token; `rank` and `position` say in an error where it stands."""
    if isinstance(token, str):
        if single := _SINGLE.fullmatch(token):
            stage, phase, microbatch = single.groups()
            return Action(phase, int(stage), int(microbatch))
        if pair := _PAIR.fullmatch(token):
            stage, microbatch, other_stage, other_microbatch = map(int, pair.groups())
            return Action(OVERLAPPED, stage, microbatch, other_stage, other_microbatch)
    written = f"'{quoted(token)}'" if isinstance(token, str) else quoted(token)
    raise ValueError(
        f"Op {position} of rank {rank} is {written}, which is no token; write the stage, one of "
        "F, B, I and W, and the microbatch, as in `3F7`, or a pair as in `(0F3;7B1)OVERLAP_F_B`."
    )


class ScheduledOps(NamedTuple):
    """The ops of all ranks, rank after rank, each in the order in which its rank runs them.

    All but `rank` and `orders` are the fields of an `Action`.
    """

    phase: Shaped[np.ndarray, "ops"]
    stage: Int[np.ndarray, "ops"]
    microbatch: Int[np.ndarray, "ops"]
    other_stage: Int[np.ndarray, "ops"]
    other_microbatch: Int[np.ndarray, "ops"]
    rank: Int[np.ndarray, "ops"]
    orders: list[range]


# Several functions need the ops of one schedule: its graph, its memory and its mean.
@ft.lru_cache(maxsize=4)
def ops_of(schedule: AbstractSchedule) -> ScheduledOps:
    """The ops of a schedule. Raises as `parse_orders`."""
    return parse_orders(schedule.orders())


def phases_of(schedule: AbstractSchedule) -> frozenset[str]:
    """The phases of a schedule's ops. For a schedule that is yet to be optimised for costs, all of
    them, because `with_costs` may need any.
    """
    if type(schedule).with_costs is not AbstractSchedule.with_costs:
        return frozenset((*PHASES, OVERLAPPED))
    phases = ops_of(schedule).phase
    return frozenset(phase for phase in (*PHASES, OVERLAPPED) if (phases == phase).any())


def parse_orders(orders: Sequence[Sequence[object]]) -> ScheduledOps:
    """Reads the tokens of all ranks.

    **Raises:**

    A `ValueError` that names the op, for a bad token.
    """
    lengths = [len(order) for order in orders]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    columns = _singles([*it.chain(*orders)])
    if columns is None:
        actions = [
            parse_token(token, rank, position)
            for rank, order in enumerate(orders)
            for position, token in enumerate(order)
        ]
        dtypes = ["U2"] + [np.int64] * 4
        columns = map(np.array, zip(*actions, strict=True), dtypes)
    return ScheduledOps(
        *columns,
        rank=np.repeat(np.arange(len(orders)), lengths),
        orders=[range(end - n, end) for end, n in zip(ends, lengths, strict=True)],
    )


def _singles(tokens: Sequence[Any]) -> tuple[Shaped[np.ndarray, "ops"], ...] | None:
    """The fields of the `Action`s of tokens that all stand for single ops, as in most schedules;
    else `None`. All are read at once, because there may be millions.
    """
    if not all(isinstance(token, str) for token in tokens):
        return None
    lines = "\n".join(tokens)
    if tokens and (lines.count("\n") >= len(tokens) or _NOT_SINGLE.search(lines)):
        return None
    letters = np.frombuffer(lines.encode(), "S1")
    numbers = np.fromstring(lines.translate(_NO_LETTERS), np.int64, sep=" ").reshape(-1, 2)
    none = np.full(len(tokens), -1)
    return letters[letters >= b"A"].astype("U2"), *numbers.T.copy(), none, none


def actions_of(ops: Any) -> list[Action]:
    """The contents of the tokens of all ops of an `ScheduledOps` or an `OpGraph`."""
    return list(map(Action, *(getattr(ops, name).tolist() for name in Action._fields)))


class Parts(NamedTuple):
    """The forwards and backwards that ops consist of: two for an overlapped pair, else one."""

    op: Int[np.ndarray, "parts"]
    phase: Shaped[np.ndarray, "parts"]
    stage: Int[np.ndarray, "parts"]
    microbatch: Int[np.ndarray, "parts"]
    rank: Int[np.ndarray, "parts"]


def parts_of(ops: ScheduledOps) -> Parts:
    """The parts of all ops, op after op."""
    pairs = ops.phase == OVERLAPPED
    op = np.repeat(np.arange(len(pairs)), 1 + pairs)
    second = np.append(False, op[1:] == op[:-1])[: len(op)]
    return Parts(
        op=op,
        phase=np.where(pairs[op], np.where(second, "B", "F"), ops.phase[op]),
        stage=np.where(second, ops.other_stage[op], ops.stage[op]),
        microbatch=np.where(second, ops.other_microbatch[op], ops.microbatch[op]),
        rank=ops.rank[op],
    )


# As many orders are kept by `ops_of`.
@ft.lru_cache(maxsize=4)
def schedule_parts(schedule: AbstractSchedule) -> Parts:
    """The forwards and backwards of a schedule, rank after rank, in the order in which they run."""
    return parts_of(ops_of(schedule))


def peak_in_flight(schedule: AbstractSchedule, *, until: str = "W") -> Int[np.ndarray, " ranks"]:
    """The most (stage, microbatch) pairs whose activations each rank holds at once.

    **Arguments:**

    - `schedule`: any schedule.
    - `until`: which half of a split backward frees the activations: `"W"`, because the gradients of
        the weights need them, or `"I"`. A whole backward always frees them. The forward of an
        overlapped pair counts before its backward.

    **Returns:**

    The number of (stage, microbatch) pairs for each rank.
    """
    if until not in ("I", "W"):
        raise ValueError(f"`until={until!r}` is unknown; use 'I' or 'W'.")
    parts = schedule_parts(schedule)
    change = (parts.phase == "F") * 1 - ((parts.phase == "B") | (parts.phase == until))
    held = [np.cumsum(change[parts.rank == rank]) for rank in range(schedule.num_ranks)]
    return np.array([counts.max(initial=0) for counts in held])
