"""A trace: when the ops of some steps of a job started and ended."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from ..data import Job


@dataclasses.dataclass(frozen=True)
class Trace:
    """Ops of some steps of a job, in seconds from the start of their step.

    **Attributes:**

    - `job`: the layout and schedule that it was recorded on.
    - `steps`: `(steps,)`, the numbers of the steps.
    - `start`, `end`: for each kind of op, `(steps, dp, pp, calls)`: a call for each microbatch of
        the first of its rank's stages, then for those of the next one; or one call. `nan` where a
        worker has no such op.
    - `dropped`: what was left out, as reason and number.
    - `notes`: what a reader of its fit should know.
    """

    job: Job
    steps: Int[np.ndarray, " steps"]
    start: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    end: dict[str, Float[np.ndarray, "steps dp pp calls"]]
    dropped: dict[str, int]
    notes: tuple[str, ...] = ()

    def step_times(self) -> Float[np.ndarray, " steps"]:
        """From the first start to the last end of each step, in seconds."""
        low = np.min([np.nanmin(x, axis=(1, 2, 3)) for x in self.start.values()], axis=0)
        high = np.max([np.nanmax(x, axis=(1, 2, 3)) for x in self.end.values()], axis=0)
        return high - low

    def __getitem__(self, chosen: slice | Int[np.ndarray, " chosen"]) -> "Trace":
        """The same trace of some of its steps."""
        return dataclasses.replace(
            self,
            steps=self.steps[chosen],
            start={op: x[chosen] for op, x in self.start.items()},
            end={op: x[chosen] for op, x in self.end.items()},
        )
