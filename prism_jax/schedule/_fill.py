"""Orders improved by list scheduling: ops move forward into bubbles, within a limit of memory."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._token import parse_token


Op = tuple[str, int, int]  # Phase, stage and microbatch.


class Rule(NamedTuple):
    """What a rank runs when it is free: what comes first in the base order, but for these.

    **Attributes:**

    - `weights_late`: whether backward-weights wait for all else that is ready: `"always"`, or
        `"cool-down"`, when all forwards of the rank's first stage have run.
    - `patience`: for how much of an op's length a rank waits, idle, for a more urgent one; of a
        forward, and of a backward-weight.
    """

    weights_late: str = "cool-down"
    patience: tuple[float, float] = (0.0, 0.0)


class Pipe(NamedTuple):
    """Costs and places of the stages.

    **Attributes:**

    - `stage_to_rank`: the rank of each stage.
    - `chain_starts`: the first stage of each chain.
    - `cost`: how long an op of a phase and stage takes.
    - `send_recv`: how long a tensor travels between two ranks.
    """

    stage_to_rank: tuple[int, ...]
    chain_starts: tuple[int, ...]
    cost: Callable[[str, int], float]
    send_recv: float = 0.0


def parse_ops(orders: Sequence[Sequence[str]]) -> list[list[Op]]:
    """The ops of tokens, none of them an overlapped pair."""
    return [
        [parse_token(token, rank, i).parts[0] for i, token in enumerate(order)]
        for rank, order in enumerate(orders)
    ]


def fill(
    base: Sequence[Sequence[Op]], pipe: Pipe, limits: Sequence[int], rule: Rule
) -> list[list[str]]:
    """Improves the orders of all ranks.

    A rank that is free starts an op of which all inputs are there, out of the order of `base`. A
    forward may go ahead only if what is left could then still run in the order of `base` within
    the limit, so that this deadlocks no more than `base` does.

    **Arguments:**

    - `base`: the orders to improve.
    - `pipe`: costs and places.
    - `limits`: for each rank, the most microbatches of stages that it may hold.
    - `rule`: which of several ops goes first.

    **Returns:**

    A list of tokens for each rank.
    """
    ends: dict[Op, float] = {}
    ranks = [_Rank(order, limit) for order, limit in zip(base, limits, strict=True)]
    choices: dict[int, tuple[float, int] | None] = {}
    for _ in range(sum(map(len, base))):
        for number, rank in enumerate(ranks):
            if number not in choices:
                choices[number] = _choose(rank, number, pipe, ends, rule)
        start, number, position = min((c[0], n, c[1]) for n, c in choices.items() if c is not None)
        op = ranks[number].run(position)
        ends[op] = ranks[number].free = start + pipe.cost(op[0], op[1])
        # What became ready is on the ranks of this stage and of its neighbours.
        for stage in range(max(op[1] - 1, 0), op[1] + 2):
            choices.pop(pipe.stage_to_rank[min(stage, len(pipe.stage_to_rank) - 1)], None)
    return [[f"{s}{phase}{i}" for phase, s, i in rank.ran] for rank in ranks]


class _Rank:
    """What a rank has run and has left."""

    def __init__(self, order: Sequence[Op], limit: int):
        self.order = list(order)
        self.limit = limit
        self.left = [True] * len(order)
        self.head = 0
        self.held = 0
        self.free = 0.0
        self.ran: list[Op] = []
        self.kinds = {op[:2] for op in order}
        self.first = min((op[1] for op in order), default=0)
        self.forwards = sum(op[:2] == ("F", self.first) for op in order)

    def run(self, position: int) -> Op:
        op = self.order[position]
        self.left[position] = False
        while self.head < len(self.order) and not self.left[self.head]:
            self.head += 1
        self.held += _change(op)
        self.forwards -= op[:2] == ("F", self.first)
        self.ran.append(op)
        return op

    def candidates(self) -> list[int]:
        """The positions of the next op of each phase and stage that memory has room for."""
        found, seen = [], set()
        held = most = self.held
        for position in range(self.head, len(self.order)):
            if not self.left[position]:
                continue
            op = self.order[position]
            if op[:2] not in seen:
                seen.add(op[:2])
                if op[0] != "F" or most < self.limit:
                    found.append(position)
                if len(seen) == len(self.kinds):
                    break
            held += _change(op)
            most = max(most, held)
        return found


def _change(op: Op) -> int:
    """By how many microbatches of stages what a rank holds changes."""
    return {"F": 1, "I": 0, "W": -1, "B": -1}[op[0]]


def _choose(
    rank: _Rank, number: int, pipe: Pipe, ends: dict[Op, float], rule: Rule
) -> tuple[float, int] | None:
    """When the next op of a rank starts, and its position; `None` where none is known to start."""
    waiting = []
    for position in rank.candidates():
        start = _ready(rank.order[position], number, pipe, ends)
        if start < math.inf:
            waiting.append((max(start, rank.free), position))
    if not waiting:
        return None
    weights_late = rule.weights_late == "always" or rank.forwards == 0

    def urgency(one: tuple[float, int]) -> tuple[bool, int]:
        return rank.order[one[1]][0] == "W" and weights_late, one[1]

    now = min(waiting)[0]
    best = min((one for one in waiting if one[0] <= now), key=urgency)
    phase, stage, _ = rank.order[best[1]]
    patience = {"F": rule.patience[0], "W": rule.patience[1]}.get(phase, 0.0)
    until = now + patience * pipe.cost(phase, stage)
    urgent = "BI" if phase == "F" else "BIF"
    soon = [one for one in waiting if one[0] < until and rank.order[one[1]][0] in urgent]
    return min(soon, key=lambda one: (one[0], urgency(one))) if soon else best


def _ready(op: Op, rank: int, pipe: Pipe, ends: dict[Op, float]) -> float:
    """When all inputs of an op are on its rank; infinite while that is not known."""
    phase, stage, microbatch = op
    if phase == "W":
        return ends.get(("I", stage, microbatch), math.inf)
    if phase == "F":
        before = [] if stage in pipe.chain_starts else [("F", stage - 1, microbatch)]
    else:
        before = [("F", stage, microbatch)]
        if stage + 1 not in (*pipe.chain_starts, len(pipe.stage_to_rank)):
            before.append((phase, stage + 1, microbatch))
    start = 0.0
    for one in before:
        away = pipe.stage_to_rank[one[1]] != rank
        start = max(start, ends.get(one, math.inf) + (pipe.send_recv if away else 0.0))
    return start
