import numpy as np
from jaxtyping import Int

from ._base import AbstractSchedule
from ._parts import schedule_parts


def peak_in_flight(schedule: AbstractSchedule, *, until: str = "W") -> Int[np.ndarray, " ranks"]:
    """The most microbatches of stages whose activations each rank holds at once.

    **Arguments:**

    - `schedule`: any schedule.
    - `until`: which half of a split backward lets go of the activations of a stage and microbatch:
        `"W"`, as the gradients of weights need them, or `"I"`. A whole backward does, and of an
        overlapped pair its forward comes first.

    **Returns:**

    A count for each rank, in stages times microbatches.
    """
    if until not in ("I", "W"):
        raise ValueError(f"`until={until!r}` is unknown; use 'I' or 'W'.")
    parts = schedule_parts(schedule)
    change = (parts.phase == "F") * 1 - ((parts.phase == "B") | (parts.phase == until))
    held = [np.cumsum(change[parts.rank == rank]) for rank in range(schedule.num_ranks)]
    return np.array([counts.max(initial=0) for counts in held])
