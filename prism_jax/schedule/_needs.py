"""What each op needs from other ops."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ._ops import ACTIVATION, GRADIENT, Action, Ops, Parts, actions_of, describe, parts_of


class Needs(NamedTuple):
    """The tensors that ops receive."""

    producer: Int[np.ndarray, "needs"]
    consumer: Int[np.ndarray, "needs"]
    stage: Int[np.ndarray, "needs"]
    microbatch: Int[np.ndarray, "needs"]
    backward: Bool[np.ndarray, "needs"]


class Inputs(NamedTuple):
    """The tensors, each of a stage, that parts read; they are of the part's own microbatch."""

    part: Int[np.ndarray, "inputs"]
    tensor: Int[np.ndarray, "inputs"]
    stage: Int[np.ndarray, "inputs"]


def find_needs(ops: Ops, stage_to_rank: tuple[int, ...], chain_starts: tuple[int, ...]) -> Needs:
    """Finds what each op needs, first from its own stage, then from the stages next to it.

    An op that another op needs on the same rank must come before it in the order.

    **Raises:**

    A `ValueError` that names the op, if it is on the wrong rank, occurs twice, or has no producer,
    or if its producer comes after it on the same rank.
    """
    parts = parts_of(ops)
    inputs = _inputs_of(parts, len(stage_to_rank), chain_starts)
    made, wanted = _keys(parts, inputs, len(stage_to_rank))
    by_key = np.argsort(made, kind="stable")
    made = made[by_key]
    repeats = np.zeros(len(made), bool)
    repeats[by_key[1:]] = made[1:] == made[:-1]
    _check_places(ops, parts, stage_to_rank, repeats)

    found = np.minimum(np.searchsorted(made, wanted), len(made) - 1)
    producer = np.where(made[found] == wanted, parts.op[by_key[found]], -1)
    _check_producers(ops, parts, inputs, producer, stage_to_rank)
    return Needs(
        producer=producer,
        consumer=parts.op[inputs.part],
        stage=inputs.stage,
        microbatch=parts.microbatch[inputs.part],
        backward=inputs.tensor == GRADIENT,
    )


def from_other_ranks(ops: Ops, needs: Needs) -> Needs:
    """Those that are sent, in the order of the receivers. All others follow from the orders."""
    sent = ops.rank[needs.producer] != ops.rank[needs.consumer]
    return Needs(*(column[sent] for column in needs))


def _inputs_of(parts: Parts, num_stages: int, chain_starts: tuple[int, ...]) -> Inputs:
    """All that parts read, first from their own stages, then from the stages next to them."""
    forward, weight = parts.phase == "F", parts.phase == "W"
    own = np.flatnonzero(~forward)
    own_tensor = np.where(weight[own], GRADIENT, ACTIVATION)
    # A forward reads from the stage before its own, a backward from the one behind, in its chain.
    starts = np.array(chain_starts)
    ends = np.append(starts[1:] - 1, num_stages - 1)
    outermost = np.where(forward, np.isin(parts.stage, starts), np.isin(parts.stage, ends))
    near = np.flatnonzero(~outermost & ~weight)
    near_stage = parts.stage[near] + np.where(forward[near], -1, 1)
    return Inputs(
        part=np.append(own, near),
        tensor=np.append(own_tensor, parts.tensor[near]),
        stage=np.append(parts.stage[own], near_stage),
    )


def _keys(parts: Parts, inputs: Inputs, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
    """A number for each tensor that is made or read, which stands for kind, stage, microbatch."""
    # Microbatches may have any numbers, so that products of these might overflow.
    different, microbatch = np.unique(parts.microbatch, return_inverse=True)

    def key(tensor, stage, part):
        # Stages outside on both sides have keys too, which no op makes.
        place = tensor * (num_stages + 2) + stage + 1
        return place * len(different) + microbatch[part]

    made = key(parts.tensor, parts.stage, np.arange(len(parts.op)))
    return made, key(inputs.tensor, inputs.stage, inputs.part)


def _check_places(
    ops: Ops, parts: Parts, stage_to_rank: tuple[int, ...], repeats: np.ndarray
) -> None:
    places = np.array([*stage_to_rank, -1])
    misplaced = places[np.minimum(parts.stage, len(stage_to_rank))] != parts.rank
    bad = np.flatnonzero(misplaced | repeats)
    if not len(bad):
        return
    part = int(bad[0])
    if misplaced[part]:
        rank = int(parts.rank[part])
        own = [stage for stage, r in enumerate(stage_to_rank) if r == rank]
        raise ValueError(
            f"{_describe_part(parts, part)} is out of place: `stage_to_rank` gives rank {rank} the "
            f"stages {own}; move it to the order of the rank of its stage, or correct "
            "`stage_to_rank`."
        )
    same = [column == column[part] for column in (parts.tensor, parts.stage, parts.microbatch)]
    token = actions_of(ops)[parts.op[np.argmax(np.all(same, axis=0))]].token
    raise ValueError(f"{_describe_part(parts, part)} repeats `{token}`; leave one of the two out.")


def _check_producers(
    ops: Ops, parts: Parts, inputs: Inputs, producer: np.ndarray, stage_to_rank: tuple[int, ...]
) -> None:
    consumer = parts.op[inputs.part]
    # Only a backward-input leaves a backward-weight to do.
    whole = (parts.phase[inputs.part] == "W") & (ops.phase[producer] != "I")
    missing = (producer < 0) | whole
    behind = (ops.rank[producer] == ops.rank[consumer]) & (producer >= consumer)
    bad = np.flatnonzero(missing | behind)
    if not len(bad):
        return
    first = int(bad[np.argmin(inputs.part[bad])])
    part = int(inputs.part[first])
    what = f"{_describe_part(parts, part)} needs {_describe_input(parts, inputs, first)}"
    if missing[first]:
        rank = stage_to_rank[inputs.stage[first]]
        raise ValueError(f"{what}, which no rank runs; add it to the order of rank {rank}.")
    raise ValueError(
        f"{what}, which that rank does not run before it; move it forward, or the orders deadlock."
    )


def _describe_part(parts: Parts, part: int) -> str:
    one = Action(str(parts.phase[part]), int(parts.stage[part]), int(parts.microbatch[part]))
    return describe(one, int(parts.rank[part]))


def _describe_input(parts: Parts, inputs: Inputs, number: int) -> str:
    """How an error names the op that would make an input."""
    part = inputs.part[number]
    stage, microbatch = inputs.stage[number], parts.microbatch[part]
    if parts.phase[part] == "W":
        return f"`{stage}I{microbatch}`"
    if inputs.tensor[number] == GRADIENT:
        return f"`{stage}B{microbatch}` or `{stage}I{microbatch}`"
    return f"`{stage}F{microbatch}`"
