"""By how much a figure falls under changes of a program, with the same random numbers."""

import itertools as it

import numpy as np

from .._progress import progress_bar
from ..engine import Composed, composed_run, prepare, with_key
from ..program import Program
from ._batches import Batched, in_batches
from ._estimate import of_all, of_batch
from ._objectives import AbstractObjective


def gains_of(
    changed: list[Program], before: list[Composed], objective: AbstractObjective, options
) -> Batched:
    """By how much the figure of each of some programs is lower than that of steps in batches.

    One program after the other, so that memory holds the steps of one.
    """
    as_it_is = [of_batch(one, objective) for one in before]
    what, shown = options["what"], options["progress"]
    options = options | {"progress": False}

    def gain(program: Program) -> Batched:
        run, numbers = prepare(program, options["key"]), it.count()
        kept: list[np.ndarray] = []

        def fall(count, key):
            b = next(numbers)
            composed = composed_run(with_key(run, key), num_samples=count, like=before[b])
            kept.append(of_batch(composed, objective))
            return np.array([of_all([as_it_is[b]], objective) - of_all([kept[b]], objective)])

        def whole():
            return np.array([of_all(as_it_is, objective) - of_all(kept, objective)])

        return in_batches(fall, of_all=whole, **options)

    found = []
    with progress_bar(len(changed), shown, what, "program") as advance:
        for program in changed:
            found.append(gain(program))
            advance(1)
    values = np.concatenate([one.value for one in found])
    return Batched(np.concatenate([one.of_batches for one in found], axis=1), values)
