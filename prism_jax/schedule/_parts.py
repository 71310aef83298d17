import functools as ft
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from ._base import AbstractSchedule
from ._ops import Ops, ops_of
from ._token import OVERLAPPED


# The tensors of a stage and microbatch. A backward-input gives the same tensor as a whole backward.
ACTIVATION, GRADIENT, WEIGHT_GRADIENT = range(3)
_TENSORS = {"F": ACTIVATION, "B": GRADIENT, "I": GRADIENT, "W": WEIGHT_GRADIENT}


class Parts(NamedTuple):
    """The forwards and backwards that ops consist of: two for an overlapped pair, else one.

    `tensor` is the tensor that a part produces.
    """

    op: Int[np.ndarray, "parts"]
    phase: Shaped[np.ndarray, "parts"]
    stage: Int[np.ndarray, "parts"]
    microbatch: Int[np.ndarray, "parts"]
    rank: Int[np.ndarray, "parts"]
    tensor: Int[np.ndarray, "parts"]


class Inputs(NamedTuple):
    """The tensors, each of a stage, that parts read; they are of the part's own microbatch."""

    part: Int[np.ndarray, "inputs"]
    tensor: Int[np.ndarray, "inputs"]
    stage: Int[np.ndarray, "inputs"]


def parts_of(ops: Ops) -> Parts:
    """The parts of all ops, op after op."""
    pairs = ops.phase == OVERLAPPED
    op = np.repeat(np.arange(len(pairs)), 1 + pairs)
    second = np.append(False, op[1:] == op[:-1])[: len(op)]
    phase = np.where(pairs[op], np.where(second, "B", "F"), ops.phase[op])
    tensor = np.zeros(len(op), np.int64)
    for letter, made in _TENSORS.items():
        tensor[phase == letter] = made
    return Parts(
        op=op,
        phase=phase,
        stage=np.where(second, ops.other_stage[op], ops.stage[op]),
        microbatch=np.where(second, ops.other_microbatch[op], ops.microbatch[op]),
        rank=ops.rank[op],
        tensor=tensor,
    )


# As many orders are kept by `ops_of`.
@ft.lru_cache(maxsize=4)
def schedule_parts(schedule: AbstractSchedule) -> Parts:
    """The forwards and backwards of a schedule, rank after rank, in the order in which they run."""
    return parts_of(ops_of(schedule))


def inputs_of(parts: Parts, num_stages: int, chain_starts: tuple[int, ...]) -> Inputs:
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


def describe_part(parts: Parts, part: int) -> str:
    """How an error names a part."""
    phase, stage, microbatch = parts.phase[part], parts.stage[part], parts.microbatch[part]
    return (
        f"`{stage}{phase}{microbatch}` (stage {stage}, microbatch {microbatch}) on rank "
        f"{parts.rank[part]}"
    )


def describe_input(parts: Parts, inputs: Inputs, number: int) -> str:
    """How an error names the op that would make an input."""
    part = inputs.part[number]
    stage, microbatch = inputs.stage[number], parts.microbatch[part]
    if parts.phase[part] == "W":
        return f"`{stage}I{microbatch}`"
    if inputs.tensor[number] == GRADIENT:
        return f"`{stage}B{microbatch}` or `{stage}I{microbatch}`"
    return f"`{stage}F{microbatch}`"
