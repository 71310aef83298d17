"""By how much a figure falls under changes of a program, with the same random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from .._progress import progress_bar
from ..engine import composed_run, led, prepare, with_key
from ..program import Program
from ._batches import Batched, pooled
from ._estimate import Figure, figure_of, figure_of_all, kept_of
from ._objectives import AbstractObjective


def falls(
    programs: Sequence[Program],
    before: Sequence[Figure],
    objective: AbstractObjective,
    *,
    key: PRNGKeyArray,
    num_samples: int,
    progress: bool,
    what: str,
) -> Batched:
    """By how much the figure of each of some programs is lower than that of `before`, the batches
    of these many steps and this key.
    """
    options: dict[str, Any] = {"key": key, "num_samples": num_samples}
    found = []
    # One program after the other, so that memory holds the steps of one.
    with progress_bar(len(programs), progress, what, "program") as advance:
        for program in programs:
            found.append(_fall(program, before, objective, options))
            advance(1)
    values = np.concatenate([one.value for one in found])
    of_batches = np.concatenate([one.of_batches for one in found], axis=1)
    return Batched(of_batches, values, found[0].num_samples)


def _fall(
    program: Program, before: Sequence[Figure], objective: AbstractObjective, options
) -> Batched:
    count, like = len(before[0].composed.steps), before[0].composed.run
    run, batch = led(prepare(program, options["key"]), count, like), iter(before)

    def both(count, key):
        was, composed = next(batch), composed_run(with_key(run, key), num_samples=count)
        return [kept_of(one, objective) for one in (was, figure_of(composed, objective))]

    def fall(kept):
        was, now = (figure_of_all(one, objective) for one in kept)
        return np.array([was - now])

    return pooled(both, fall, **options)
