"""By how much a figure falls under changes of a program, with the same random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from .._progress import progress_bar
from ..program import Program
from ._bootstrap import Bootstrapped, combined, stacked
from ._estimate import Figure, figure, figure_value
from ._objectives import AbstractObjective


def falls(
    programs: Sequence[Program],
    before: Figure,
    objective: AbstractObjective,
    *,
    key: PRNGKeyArray,
    progress: bool,
    what: str,
) -> Bootstrapped:
    """By how much the figure of each program is lower than `before`, which is the figure of another
    program with the same graph and the same key.
    """
    like, found = before.simulated, []
    # One program after the other, so that memory holds the steps of one.
    with progress_bar(len(programs), progress, what, "program") as advance:
        for program in programs:
            options: dict[str, Any] = {"num_samples": len(like.steps), "key": key, "like": like}
            found.append(figure_value(figure(program, objective, **options)))
            advance(1)
    return combined(np.subtract, figure_value(before), stacked(*found))
