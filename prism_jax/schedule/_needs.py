from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ._ops import Ops, action
from ._parts import GRADIENT, Inputs, Parts, describe_input, describe_part, inputs_of, parts_of


class Needs(NamedTuple):
    """The tensors that ops receive from stages on other ranks, in the order of the receivers."""

    producer: Int[np.ndarray, "needs"]
    consumer: Int[np.ndarray, "needs"]
    stage: Int[np.ndarray, "needs"]
    microbatch: Int[np.ndarray, "needs"]
    backward: Bool[np.ndarray, "needs"]


def find_needs(ops: Ops, stage_to_rank: tuple[int, ...], chain_starts: tuple[int, ...]) -> Needs:
    """Finds what each op needs from other ranks.

    An op that another op needs on the same rank must come before it in the order; this is not a
    dependency of its own.

    **Raises:**

    A `ValueError` that names the op, if it is on the wrong rank, occurs twice, or has no producer,
    or if its producer comes after it on the same rank.
    """
    parts = parts_of(ops)
    inputs = inputs_of(parts, len(stage_to_rank), chain_starts)
    made, wanted = _keys(parts, inputs, len(stage_to_rank))
    by_key = np.argsort(made, kind="stable")
    made = made[by_key]
    repeats = np.zeros(len(made), bool)
    repeats[by_key[1:]] = made[1:] == made[:-1]
    _check_places(ops, parts, stage_to_rank, repeats)

    found = np.minimum(np.searchsorted(made, wanted), len(made) - 1)
    producer = np.where(made[found] == wanted, parts.op[by_key[found]], -1)
    _check_producers(ops, parts, inputs, producer, stage_to_rank)

    # All of these are from the stages next to those that need them, so they are in order.
    received = np.flatnonzero(ops.rank[producer] != parts.rank[inputs.part])
    part = inputs.part[received]
    return Needs(
        producer=producer[received],
        consumer=parts.op[part],
        stage=inputs.stage[received],
        microbatch=parts.microbatch[part],
        backward=inputs.tensor[received] == GRADIENT,
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
            f"{describe_part(parts, part)} is out of place: `stage_to_rank` gives rank {rank} the "
            f"stages {own}; move it to the order of the rank of its stage, or correct "
            "`stage_to_rank`."
        )
    same = [column == column[part] for column in (parts.tensor, parts.stage, parts.microbatch)]
    token = action(ops, int(parts.op[np.argmax(np.all(same, axis=0))])).token
    raise ValueError(f"{describe_part(parts, part)} repeats `{token}`; leave one of the two out.")


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
    what = f"{describe_part(parts, part)} needs {describe_input(parts, inputs, first)}"
    if missing[first]:
        rank = stage_to_rank[inputs.stage[first]]
        raise ValueError(f"{what}, which no rank runs; add it to the order of rank {rank}.")
    raise ValueError(
        f"{what}, which that rank does not run before it; move it forward, or the orders deadlock."
    )
