"""A run: what decides the steps of each of its stretches, and the steps."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..law import LEVELS, Errors
from ..replica import interruptible, tiles, without_graph
from ..step import (
    STEP_TILES,
    AbstractDecision,
    Over,
    Reservoir,
    decide,
    steps_of,
)
from ._draw import Advance, Draws, draw
from ._prepare import Run


@dataclasses.dataclass(frozen=True)
class Stretch:
    """One stretch of a run: how it was drawn, what decides its steps, and how many there are: fewer
    than asked for after Ctrl-C.
    """

    draws: Draws
    decision: AbstractDecision
    steps: int


def decided_stretches(
    run: Run,
    draws: Sequence[Draws],
    *,
    exact: bool = False,
    num_replicas: int | None = None,
    advance: Advance = lambda steps: None,
) -> Iterator[Stretch]:
    """Draws the stretches of a run, one after the other, and decides their steps.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, and after the steps drawn so far were given as a last stretch.
    """
    replicas = run.program.num_replicas if num_replicas is None else num_replicas
    with interruptible() as interrupt:
        for mine in draws:
            rows = mine.steps if mine.explicit else mine.replicas
            of_strata, ranks = len(run.program.strata), run.program.num_ranks
            reservoir = Reservoir(ranks, of_strata, run.plan.dtype, mine.first, rows)
            try:
                draw(run, mine, reservoir, advance)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            kept = reservoir.replicas()
            if kept.drawn:
                steps = kept.drawn if interrupted else mine.steps
                number = 1 if mine.explicit else replicas
                decision = decide(
                    run.chances, kept, run.key, steps, num_replicas=number, exact=exact
                )
                # What was drawn is to be composed; Ctrl-C while it was decided ends the run then.
                interrupted |= interrupt.came
                interrupt.came = False
                yield Stretch(mine, decision, steps)
            if interrupted:
                raise KeyboardInterrupt


def composed(
    run: Run, stretch: Stretch, over: Over | None = None, advance: Advance = lambda steps: None
) -> Iterator[np.ndarray]:
    """The steps of a stretch, a batch at a time, in order: their times, or the probabilities that
    they are over a threshold.
    """
    inputs = step_inputs(run, stretch)
    shared = (without_graph(run.plan), run.key, over)
    first = stretch.decision.kept.first
    for batch in tiles(
        _step_tile, shared, stretch.steps, inputs, first=first, per_batch=STEP_TILES
    ):
        yield batch.samples()
        advance(batch.count)


def step_inputs(run: Run, stretch: Stretch) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    """What decides the steps from an id on: ends, with room for all ranks, and regimes."""
    room = run.plan.structure.ranks

    def inputs(first, count):
        ends, regimes = stretch.decision.inputs(first, count)
        padding = np.zeros((count, room - ends.shape[1]), ends.dtype)
        return np.concatenate([ends, padding], axis=1) if padding.size else ends, regimes

    return inputs


def _step_tile(shared, ids, ends, regimes):
    plan, key, over = shared
    return steps_of(plan, ends.T, ids, key, regimes, over)


def errors_of(decision: AbstractDecision, steps: np.ndarray) -> Errors:
    """The standard errors of a law, from the first steps of a stretch, which are used up."""
    errors = decision.errors(len(steps))
    thresholds = np.quantile(steps.copy(), LEVELS, overwrite_input=True)
    levels = [errors.of_level(steps, t) for t in thresholds]
    # In place from here on.
    steps -= np.mean(steps, dtype=np.float64).astype(steps.dtype)
    mean = errors.of_mean(steps)
    spread = np.std(steps, dtype=np.float64).astype(steps.dtype)
    steps *= steps
    steps -= spread**2
    steps /= 2 * spread if spread > 0 else 1
    return Errors(
        mean=mean,
        std=errors.of_mean(steps),
        support=errors.support(),
        levels=np.array([error for error, _ in levels]),
        level_support=np.array([support for _, support in levels]),
    )
