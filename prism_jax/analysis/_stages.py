"""Which pipeline rank runs a stage."""

import numpy as np
from jaxtyping import Int

from ..program import Program


def ranks_of_stages(program: Program) -> Int[np.ndarray, " stages"]:
    """The pipeline rank that runs each (global virtual) stage."""
    ops, compute = program.ops, ~program.ops.is_send_recv
    ranks = np.zeros(int(ops.stage.value.max(initial=0)) + 1, np.int64)
    ranks[ops.stage.value[compute]] = ops.rank.value[compute]
    return ranks
