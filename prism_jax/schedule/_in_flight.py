import numpy as np
from jaxtyping import Int

from ._base import AbstractSchedule
from ._parts import schedule_parts


def peak_in_flight(schedule: AbstractSchedule, *, until: str = "W") -> Int[np.ndarray, " ranks"]:
    """The most (stage, microbatch) pairs whose activations each rank holds at once.

    **Arguments:**

    - `schedule`: any schedule.
    - `until`: which half of a split backward frees the activations: `"W"`, because the gradients of
        the weights need them, or `"I"`. A whole backward always frees them. The forward of an
        overlapped pair counts before its backward.

    **Returns:**

    The number of (stage, microbatch) pairs for each rank.
    """
    if until not in ("I", "W"):
        raise ValueError(f"`until={until!r}` is unknown; use 'I' or 'W'.")
    parts = schedule_parts(schedule)
    change = (parts.phase == "F") * 1 - ((parts.phase == "B") | (parts.phase == until))
    held = [np.cumsum(change[parts.rank == rank]) for rank in range(schedule.num_ranks)]
    return np.array([counts.max(initial=0) for counts in held])
