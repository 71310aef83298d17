"""By how much a figure falls under changes of a program, with the same random numbers."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from .._progress import progress_bar
from ..program import Program
from ._batches import Batched, beside
from ._estimate import Figure, figure, figure_batches
from ._objectives import AbstractObjective


def falls(
    programs: Sequence[Program],
    before: Figure,
    objective: AbstractObjective,
    *,
    key: PRNGKeyArray,
    progress: bool,
    what: str,
) -> Batched:
    """By how much the figure of each program is lower than `before`, which is the figure of another
    program with the same graph and the same key.
    """
    like = before.composed
    found = [figure_batches(before)]
    # One program after the other, so that memory holds the steps of one.
    with progress_bar(len(programs), progress, what, "program") as advance:
        for program in programs:
            options: dict[str, Any] = {"num_samples": len(like.steps), "batches": like.batches}
            found.append(figure_batches(figure(program, objective, key=key, like=like, **options)))
            advance(1)
    return beside(*found).through(lambda x: x[:, :1] - x[:, 1:])
