"""A trace: when the ops of some steps of a job started and ended, and which ops there are."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ..data import Job


# Ops that a worker runs for each microbatch of each of its stages, and their letters in the tokens
# of schedules. A backward is one op, or two: of the input, on which the next stage waits, and of
# the weights.
LETTERS = {"forward-compute": "F", "backward-compute": "B"}
LETTERS |= {"backward-input": "I", "backward-weight": "W"}
COMPUTE = tuple(LETTERS)
# Transfers between stages, with the distance of the other stage.
TRANSFERS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
PIPELINED = (*COMPUTE, *TRANSFERS)
# Ops that a worker runs once in a step, and with whom: the other replicas of its stage, the last
# stage of its replica, all workers, or no worker whose op is in the trace.
SCOPES = {
    "load-data": "self",
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "embedding-grads-all-reduce": "pp",
    "optimizer-clip-main-grad": "world",
    "layernorm-grads-all-reduce": "self",
    "optimizer": "self",
    "gc": "self",
}
OPS = (*PIPELINED, *SCOPES)
FORWARD_COMPUTE, BACKWARD_COMPUTE, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
LOAD_DATA = "load-data"  # The time of a step before its first op.
REDUCE = "grads-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The ops of some steps of a job. Times are in seconds from the start of each step.

    **Attributes:**

    - `job`: the layout and the schedule of the traced job.
    - `steps`: `(steps,)`, the numbers of the steps.
    - `start`, `end`: for each kind of op, an array `(steps, dp, pp, calls)` of when each call
        starts and ends. There is a call for each microbatch of the first stage on the rank, then
        for those of its next stage; or a single call. `nan` if a worker has no such op.
    - `dropped`: how many rows or steps were left out, by reason.
    - `notes`: warnings for readers of a fit to the trace.
    """

    job: Job
    steps: Int[np.ndarray, " steps"]
    start: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    end: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    dropped: dict[str, int]
    notes: tuple[str, ...] = ()

    def step_times(self) -> Float[np.ndarray, " steps"]:
        """The time from the first start to the last end in each step, in seconds."""
        low = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in self.start.values()], axis=0)
        high = np.max([np.nanmax(x, axis=(1, 2, 3)) for x in self.end.values()], axis=0)
        return high - low

    def __getitem__(self, chosen: slice | Int[np.ndarray, " chosen"]) -> "Trace":
        """The same trace with only some of its steps."""
        return dataclasses.replace(
            self,
            steps=self.steps[chosen],
            start={op: x[chosen] for op, x in self.start.items()},
            end={op: x[chosen] for op, x in self.end.items()},
        )
