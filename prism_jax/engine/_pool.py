"""Pools the steps of all batches. Batches give the scatter of a figure. The figure itself is from
steps that the samples of all batches decide, because few samples bias the slowest of many replicas.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..step import RESERVOIR, Replicas, decide
from ._draw import Draws
from ._prepare import Run
from ._run import Stretch


def pooled(run: Run, stretches: tuple[Stretch, ...], num_replicas: int) -> tuple[Stretch, ...]:
    """The same steps in fewer stretches, which are so long that all samples of each can be kept.

    **Arguments:**

    - `stretches`: consecutive stretches with equally many steps.
    - `num_replicas`: the number of replicas in a step.
    """
    size = RESERVOIR // max(stretch.decision.kept.drawn for stretch in stretches)
    return tuple(_pools(run, stretches, size, num_replicas)) if size > 1 else stretches


def _pools(
    run: Run, stretches: Sequence[Stretch], size: int, num_replicas: int
) -> Iterator[Stretch]:
    for start in range(0, len(stretches), size):
        some = stretches[start : start + size]
        if len(some) == 1:
            yield from some
            continue
        first, steps = some[0].draws, sum(stretch.steps for stretch in some)
        kept = _together([stretch.decision.kept for stretch in some])
        decision = decide(run.chances, kept, run.key, steps, num_replicas=num_replicas)
        draws = Draws(first.sampling, first.lead, first.first, steps)
        yield Stretch(draws, decision, steps)


def _together(kept: Sequence[Replicas]) -> Replicas:
    """All samples, if none were dropped."""
    fields = ("ids", "ends", "score", "stratum", "likelihood")
    arrays = (np.concatenate([getattr(one, name) for one in kept]) for name in fields)
    return Replicas(
        *arrays, counts=np.sum([one.counts for one in kept], axis=0), first=kept[0].first
    )
