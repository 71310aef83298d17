from collections.abc import Sequence
from typing import NamedTuple

from ._token import Action, parse_token


class Need(NamedTuple):
    """A tensor that an op receives from a stage of another rank."""

    producer: int
    stage: int
    microbatch: int
    backward: bool


class Ops(NamedTuple):
    """The ops of all ranks, rank after rank, each in the order in which its rank runs them."""

    actions: list[Action]
    ranks: list[int]
    orders: list[range]
    needs: list[list[Need]]


def parse_orders(
    orders: Sequence[Sequence[str]],
    stage_to_rank: tuple[int, ...],
    chain_starts: tuple[int, ...],
) -> Ops:
    """Reads the tokens of all ranks, and finds what each op needs from other ranks.

    What an op needs from its own rank must be before it in the order, and is nothing to wait for.

    **Raises:**

    A `ValueError` that names the op, for a bad token, an op on a wrong rank, an op that is there
    twice, an op whose producer is nowhere or behind it on its own rank.
    """
    actions = []
    ranks = []
    spans = []
    for rank, order in enumerate(orders):
        spans.append(range(len(actions), len(actions) + len(order)))
        actions += [parse_token(token, rank, i) for i, token in enumerate(order)]
        ranks += [rank] * len(order)
    producers = _producers(actions, ranks, stage_to_rank)
    starts = set(chain_starts)
    ends = {start - 1 for start in chain_starts[1:]} | {len(stage_to_rank) - 1}
    needs = []
    for op, (action, rank) in enumerate(zip(actions, ranks, strict=True)):
        received = []
        for phase, stage, microbatch in action.parts:
            for tensor, source in _inputs(phase, stage, starts, ends):
                producer = producers.get((tensor, source, microbatch))
                if producer is None or (phase == "W" and actions[producer].phase != "I"):
                    raise ValueError(
                        f"{_describe(phase, stage, microbatch, rank)} needs "
                        f"{_wanted(phase, tensor, source, microbatch)}, which no rank runs; add it "
                        f"to the order of rank {stage_to_rank[source]}."
                    )
                if ranks[producer] != rank:
                    received.append(Need(producer, source, microbatch, tensor == "B"))
                elif producer >= op:
                    raise ValueError(
                        f"{_describe(phase, stage, microbatch, rank)} needs "
                        f"{_wanted(phase, tensor, source, microbatch)}, which that rank does "
                        "not run before it; move it forward, or the orders deadlock."
                    )
        needs.append(received)
    return Ops(actions, ranks, spans, needs)


def _producers(
    actions: list[Action], ranks: list[int], stage_to_rank: tuple[int, ...]
) -> dict[tuple[str, int, int], int]:
    """The op that makes each tensor: an activation "F", its gradient "B" or the weight's "W"."""
    producers = {}
    for op, (action, rank) in enumerate(zip(actions, ranks, strict=True)):
        for phase, stage, microbatch in action.parts:
            if stage >= len(stage_to_rank) or stage_to_rank[stage] != rank:
                own = [s for s, r in enumerate(stage_to_rank) if r == rank]
                raise ValueError(
                    f"{_describe(phase, stage, microbatch, rank)} is out of place: "
                    f"`stage_to_rank` gives rank {rank} the stages {own}; move it to the order of "
                    "the rank of its stage, or correct `stage_to_rank`."
                )
            key = ("B" if phase == "I" else phase, stage, microbatch)
            if key in producers:
                raise ValueError(
                    f"{_describe(phase, stage, microbatch, rank)} repeats "
                    f"`{actions[producers[key]].token}`; leave one of the two out."
                )
            producers[key] = op
    return producers


def _inputs(phase: str, stage: int, starts: set[int], ends: set[int]) -> list[tuple[str, int]]:
    """The tensors of the same microbatch, with their stages, that a phase of a stage reads."""
    if phase == "W":
        return [("B", stage)]
    if phase == "F":
        return [] if stage in starts else [("F", stage - 1)]
    return [("F", stage)] if stage in ends else [("F", stage), ("B", stage + 1)]


def _describe(phase: str, stage: int, microbatch: int, rank: int) -> str:
    return f"`{stage}{phase}{microbatch}` (stage {stage}, microbatch {microbatch}) on rank {rank}"


def _wanted(phase: str, tensor: str, stage: int, microbatch: int) -> str:
    if phase == "W":
        return f"`{stage}I{microbatch}`"
    if tensor == "B":
        return f"`{stage}B{microbatch}` or `{stage}I{microbatch}`"
    return f"`{stage}F{microbatch}`"
