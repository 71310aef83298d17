import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from ._base import AbstractSchedule
from ._token import OVERLAPPED, PHASES, Action, parse_tokens


class Ops(NamedTuple):
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
def ops_of(schedule: AbstractSchedule) -> Ops:
    """The ops of a schedule. Raises as `parse_orders`."""
    return parse_orders(schedule.orders())


def phases_of(schedule: AbstractSchedule) -> frozenset[str]:
    """The phases of a schedule's ops. For a schedule that is yet to be optimised for costs, all of
    them, because `with_costs` may need any.
    """
    if type(schedule).with_costs is not AbstractSchedule.with_costs:
        return frozenset((*PHASES, OVERLAPPED))
    found = ops_of(schedule).phase
    return frozenset(one for one in (*PHASES, OVERLAPPED) if (found == one).any())


def parse_orders(orders: Sequence[Sequence[str]]) -> Ops:
    """Reads the tokens of all ranks.

    **Raises:**

    A `ValueError` that names the op, for a bad token.
    """
    lengths = [len(order) for order in orders]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    # A schedule without ranks is treated as one rank without ops.
    tables = [parse_tokens(order, rank) for rank, order in enumerate(orders or [[]])]
    phase, *numbers = (np.concatenate(column) for column in zip(*tables, strict=True))
    stage, microbatch, other_stage, other_microbatch = numbers
    return Ops(
        phase,
        stage,
        microbatch,
        other_stage,
        other_microbatch,
        rank=np.repeat(np.arange(len(orders)), lengths),
        orders=[range(end - n, end) for end, n in zip(ends, lengths, strict=True)],
    )


def action(ops: Ops, op: int) -> Action:
    """The contents of the token of an op."""
    return Action(
        str(ops.phase[op]),
        int(ops.stage[op]),
        int(ops.microbatch[op]),
        int(ops.other_stage[op]),
        int(ops.other_microbatch[op]),
    )
