"""Which ops compute, and which pipeline rank runs a stage."""

import numpy as np
from jaxtyping import Bool, Int

from ..program import Program


def computes(program: Program) -> Bool[np.ndarray, " ops"]:
    """Whether an op is one of a stage, and no communication between stages."""
    return ~program.ops.is_send_recv


def ranks_of_stages(program: Program) -> Int[np.ndarray, " stages"]:
    """The pipeline rank that runs each (global virtual) stage."""
    ops, compute = program.ops, computes(program)
    ranks = np.zeros(int(ops.stage.value.max(initial=0)) + 1, np.int64)
    ranks[ops.stage.value[compute]] = ops.rank.value[compute]
    return ranks
