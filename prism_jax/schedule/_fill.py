"""Improves orders by list scheduling: ops move forward into bubbles, within a memory limit."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ._needs import find_needs
from ._ops import parse_orders


Op = tuple[str, int, int]  # Phase, stage and microbatch.


class Rule(NamedTuple):
    """What a rank runs when it is free: the first op in the base order, with these exceptions.

    **Attributes:**

    - `weights_late`: whether backward-weights always wait for all other ops that are ready, and not
        only after all forwards of the rank's first stage have run.
    - `patience`: for how long an idle rank waits for a more urgent op, as a share of the length of
        the op that it could run, by the phase of that op: `F` or `W`.
    """

    weights_late: bool
    patience: Mapping[str, float]


_RULE = Rule(weights_late=False, patience={})


class Pipe(NamedTuple):
    """The costs of the stages, and where they are.

    **Attributes:**

    - `stage_to_rank`: the rank of each stage.
    - `chain_starts`: the first stage of each chain.
    - `cost`: how long an op of a phase and stage takes. By default, a whole backward takes as long
        as two forwards.
    - `send_recv`: how long a send_recv between two ranks takes.
    """

    stage_to_rank: tuple[int, ...]
    chain_starts: tuple[int, ...] = (0,)
    cost: Callable[[str, int], float] = lambda phase, _: 2.0 if phase == "B" else 1.0
    send_recv: float = 0.0


def fill(
    base: Sequence[Sequence[str]], pipe: Pipe, limits: Sequence[int], rule: Rule = _RULE
) -> list[list[str]]:
    """Improves the orders of all ranks.

    A free rank starts an op whose inputs are all available, even if it comes later in the order of
    `base`. A forward may run early only if the remaining ops could then still run in the order of
    `base` within the limit, so that the result deadlocks only if `base` does.

    **Arguments:**

    - `base`: the orders to improve: the tokens of each rank, without overlapped pairs.
    - `pipe`: costs and places.
    - `limits`: for each rank, the most (stage, microbatch) pairs that it may hold.
    - `rule`: which of several ops goes first.

    **Returns:**

    A list of tokens for each rank.
    """
    arrays = parse_orders(base)
    needs = find_needs(arrays, pipe.stage_to_rank, pipe.chain_starts)
    ops: list[Op] = list(zip(*(column.tolist() for column in arrays[:3]), strict=True))
    delays = pipe.send_recv * (arrays.rank[needs.producer] != arrays.rank[needs.consumer])
    inputs: dict[Op, list[tuple[Op, float]]] = {op: [] for op in ops}
    for before, op, delay in zip(needs.producer, needs.consumer, delays.tolist(), strict=True):
        inputs[ops[op]].append((ops[before], delay))
    costs = {op: pipe.cost(op[0], op[1]) for op in ops}
    ranks = [
        _Rank(ops[order.start : order.stop], limit)
        for order, limit in zip(arrays.orders, limits, strict=True)
    ]
    ends: dict[Op, float] = {}
    choices: dict[int, tuple[float, int] | None] = {}
    for _ in ops:
        for number, rank in enumerate(ranks):
            if number not in choices:
                choices[number] = _choose(rank, inputs, costs, ends, rule)
        start, number, position = min((c[0], n, c[1]) for n, c in choices.items() if c is not None)
        op = ranks[number].run(position)
        ends[op] = ranks[number].free = start + costs[op]
        # Only ranks of this stage and of its neighbours have ops that became ready.
        for stage in range(max(op[1] - 1, 0), op[1] + 2):
            choices.pop(pipe.stage_to_rank[min(stage, len(pipe.stage_to_rank) - 1)], None)
    return [[f"{s}{phase}{i}" for phase, s, i in rank.ran] for rank in ranks]


def fill_units(
    unit: Callable[[range], Sequence[Sequence[str]]],
    num_microbatches: int,
    size: int,
    pipe: Pipe,
    limits: Sequence[int],
) -> list[list[str]]:
    """Fills units of microbatches, concatenates them, and fills the bubbles between them.

    **Arguments:**

    - `unit`: the orders to improve, for some microbatches.
    - `num_microbatches`: the number of microbatches in all units together.
    - `size`: the number of microbatches in a unit; the last unit may be smaller.
    - `pipe`, `limits`: as in `fill`.
    """
    joined: list[list[str]] = [[] for _ in limits]
    for start in range(0, num_microbatches, size):
        microbatches = range(start, min(start + size, num_microbatches))
        for order, filled in zip(joined, fill(unit(microbatches), pipe, limits), strict=True):
            order += filled
    return fill(joined, pipe, limits)


# The phases that a rank may wait for instead of running an op.
_MORE_URGENT = {"F": "BI", "W": "BIF"}
# The change of the number of microbatches that a rank holds, by phase.
_CHANGE = {"F": 1, "I": 0, "W": -1, "B": -1}


class _Rank:
    """The ops that a rank has run, and those that are left, in the order to improve."""

    def __init__(self, order: list[Op], limit: int):
        self.order = order
        self.limit = limit
        self.held = 0
        self.free = 0.0
        self.ran: list[Op] = []
        self.left = Counter(op[:2] for op in order)
        self.first = min((op[1] for op in order), default=0)

    def run(self, position: int) -> Op:
        op = self.order.pop(position)
        self.held += _CHANGE[op[0]]
        self.left[op[:2]] -= 1
        self.ran.append(op)
        return op

    def candidates(self) -> list[int]:
        """The positions of the next op of each phase and stage that memory has room for."""
        positions, seen, kinds = [], set(), len(+self.left)
        held = most = self.held
        for position, op in enumerate(self.order):
            if op[:2] not in seen:
                seen.add(op[:2])
                if op[0] != "F" or most < self.limit:
                    positions.append(position)
                if len(seen) == kinds:
                    break
            held += _CHANGE[op[0]]
            most = max(most, held)
        return positions


def _choose(
    rank: _Rank,
    inputs: dict[Op, list[tuple[Op, float]]],
    costs: dict[Op, float],
    ends: dict[Op, float],
    rule: Rule,
) -> tuple[float, int] | None:
    """The start of a rank's next op, and its position; `None` if no op is known to start."""
    waiting = []
    late = rule.weights_late or not rank.left["F", rank.first]
    for position in rank.candidates():
        op = rank.order[position]
        start = rank.free
        for before, delay in inputs[op]:
            start = max(start, ends.get(before, math.inf) + delay)
        if start < math.inf:
            waiting.append((start, op[0] == "W" and late, position))
    if not waiting:
        return None
    now = min(waiting)[0]
    best = min((later, position) for start, later, position in waiting if start <= now)[1]
    op = rank.order[best]
    until = now + rule.patience.get(op[0], 0.0) * costs[op]
    urgent = _MORE_URGENT.get(op[0], "")
    soon = [wait for wait in waiting if wait[0] < until and rank.order[wait[2]][0] in urgent]
    if soon:
        now, _, best = min(soon)
    return now, best
