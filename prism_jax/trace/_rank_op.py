"""One op of one rank."""

import dataclasses


FORWARD_COMPUTE, BACKWARD_COMPUTE, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
LOAD_DATA = "load-data"  # The time of a step before its first op.
# Operators of the host that wait for others.
WAITING = ("c10d::", "_c10d_functional::", "record_param_comms")


@dataclasses.dataclass(frozen=True)
class RankOp:
    """One op of one rank; times in nanoseconds. `microbatch` and `stage` are -1 if names do not
    give them.
    """

    step: int
    op: str
    microbatch: int
    stage: int
    start: int
    end: int
