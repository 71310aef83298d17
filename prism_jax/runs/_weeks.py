"""Weeks whose interruptions come more often, or less, than on average.

`weeks[:, i]` are the seconds of the first `i` weeks, each weighted by the factor of its week. After
the last week the first begins again.
"""

import numpy as np
from jaxtyping import Float


WEEK = 7 * 86_400.0


def exposed(
    seconds: Float[np.ndarray, "runs"], weeks: Float[np.ndarray, "runs ends"]
) -> Float[np.ndarray, "runs"]:
    """The weighted seconds after so many seconds of each run."""
    turns, week = np.divmod(seconds / WEEK, weeks.shape[1] - 1)
    before, after = _ends(weeks, week.astype(int))
    return turns * weeks[:, -1] + before + (week % 1) * (after - before)


def reached(
    weighted: Float[np.ndarray, "runs"], weeks: Float[np.ndarray, "runs ends"]
) -> Float[np.ndarray, "runs"]:
    """After how many seconds each run has so many weighted ones: the inverse of `exposed`."""
    turns, rest = np.divmod(weighted, weeks[:, -1])
    week = (weeks[:, 1:-1] <= rest[:, None]).sum(axis=1)
    before, after = _ends(weeks, week)
    return WEEK * (turns * (weeks.shape[1] - 1) + week + (rest - before) / (after - before))


def _ends(weeks, week):
    runs = np.arange(len(weeks))
    return weeks[runs, week], weeks[runs, week + 1]
