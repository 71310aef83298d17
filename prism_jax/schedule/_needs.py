"""What each op needs from other ops."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ._ops import Action, Parts, ScheduledOps, actions_of, describe_op, parts_of


class Needs(NamedTuple):
    """The tensors that ops receive.

    `producer` and `consumer` are ops, `part` is the part of the consumer that reads the tensor, and
    `backward` tells gradients from activations, each of a stage and a microbatch.
    """

    part: Int[np.ndarray, "needs"]
    producer: Int[np.ndarray, "needs"]
    consumer: Int[np.ndarray, "needs"]
    stage: Int[np.ndarray, "needs"]
    microbatch: Int[np.ndarray, "needs"]
    backward: Bool[np.ndarray, "needs"]


def find_needs(
    ops: ScheduledOps, stage_to_rank: tuple[int, ...], chain_starts: tuple[int, ...]
) -> Needs:
    """Finds what each op needs, first from its own stage, then from the stages next to it.

    An op that another op needs on the same rank must come before it in the order.

    **Raises:**

    A `ValueError` that names the op, if it is on the wrong rank, occurs twice, or has no producer,
    or if its producer comes after it on the same rank.
    """
    parts = parts_of(ops)
    needs = _without_producers(parts, len(stage_to_rank), chain_starts)
    # Microbatches may have any numbers, so that products of these might overflow.
    different = np.unique(parts.microbatch)

    def key(tensor, stage, microbatch):
        """A number for a tensor. Stages outside on both sides have some too, which no op makes."""
        place = tensor * (len(stage_to_rank) + 2) + stage + 1
        return place * len(different) + np.searchsorted(different, microbatch)

    # A backward-input gives the same gradient as a whole backward, and a backward-weight another.
    tensor = np.where(parts.phase == "F", 0, 1) + (parts.phase == "W")
    every = key(tensor, parts.stage, parts.microbatch)
    made, maker, number = np.unique(every, return_index=True, return_inverse=True)
    _check_places(ops, parts, stage_to_rank, maker[number])
    wanted = key(np.where(needs.backward, 1, 0), needs.stage, needs.microbatch)
    places = np.minimum(np.searchsorted(made, wanted), len(made) - 1)
    producer = np.where(made[places] == wanted, parts.op[maker[places]], -1)
    needs = needs._replace(producer=producer)
    _check_producers(ops, parts, needs, stage_to_rank)
    return needs


def _without_producers(parts: Parts, num_stages: int, chain_starts: tuple[int, ...]) -> Needs:
    """All that parts read, first from their own stages, then from the stages next to them."""
    forward, weight = parts.phase == "F", parts.phase == "W"
    backwards = np.flatnonzero(~forward)
    # A forward reads from the stage before its own, a backward from the one behind, in its chain.
    starts = np.array(chain_starts)
    ends = np.append(starts[1:] - 1, num_stages - 1)
    outermost = np.where(forward, np.isin(parts.stage, starts), np.isin(parts.stage, ends))
    inner = np.flatnonzero(~outermost & ~weight)
    near_stage = parts.stage[inner] + np.where(forward[inner], -1, 1)
    part = np.append(backwards, inner)
    return Needs(
        part=part,
        producer=np.full(len(part), -1),
        consumer=parts.op[part],
        stage=np.append(parts.stage[backwards], near_stage),
        microbatch=parts.microbatch[part],
        backward=np.append(weight[backwards], ~forward[inner]),
    )


def _check_places(
    ops: ScheduledOps, parts: Parts, stage_to_rank: tuple[int, ...], maker: np.ndarray
) -> None:
    """`maker` is the first part that makes the tensor of each part."""
    places = np.array([*stage_to_rank, -1])
    misplaced = places[np.minimum(parts.stage, len(stage_to_rank))] != parts.rank
    bad = np.flatnonzero(misplaced | (maker != np.arange(len(maker))))
    if not len(bad):
        return
    part = int(bad[0])
    if misplaced[part]:
        rank = int(parts.rank[part])
        held = [stage for stage, r in enumerate(stage_to_rank) if r == rank]
        raise ValueError(
            f"{_describe_part(parts, part)} is out of place: `stage_to_rank` gives rank {rank} the "
            f"stages {held}; move it to the order of the rank of its stage, or correct "
            "`stage_to_rank`."
        )
    token = actions_of(ops)[parts.op[maker[part]]].token
    raise ValueError(f"{_describe_part(parts, part)} repeats `{token}`; leave one of the two out.")


def _check_producers(
    ops: ScheduledOps, parts: Parts, needs: Needs, stage_to_rank: tuple[int, ...]
) -> None:
    producer, consumer = needs.producer, needs.consumer
    # Only a backward-input leaves a backward-weight to do.
    joined = (parts.phase[needs.part] == "W") & (ops.phase[producer] != "I")
    missing = (producer < 0) | joined
    behind = (ops.rank[producer] == ops.rank[consumer]) & (producer >= consumer)
    bad = np.flatnonzero(missing | behind)
    if not len(bad):
        return
    first = int(bad[np.argmin(needs.part[bad])])
    part = int(needs.part[first])
    need = f"{_describe_part(parts, part)} needs {_describe_need(parts, needs, first)}"
    if missing[first]:
        rank = stage_to_rank[needs.stage[first]]
        raise ValueError(f"{need}, which no rank runs; add it to the order of rank {rank}.")
    raise ValueError(
        f"{need}, which that rank does not run before it; move it forward, or the orders deadlock."
    )


def _describe_part(parts: Parts, part: int) -> str:
    action = Action(str(parts.phase[part]), int(parts.stage[part]), int(parts.microbatch[part]))
    return describe_op(action, int(parts.rank[part]))


def _describe_need(parts: Parts, needs: Needs, number: int) -> str:
    """How an error names the op that would make a tensor."""
    stage, microbatch = needs.stage[number], needs.microbatch[number]
    if parts.phase[needs.part[number]] == "W":
        return f"`{stage}I{microbatch}`"
    if needs.backward[number]:
        return f"`{stage}B{microbatch}` or `{stage}I{microbatch}`"
    return f"`{stage}F{microbatch}`"
