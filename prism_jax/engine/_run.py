"""Runs: decides the steps of each chunk, and composes them."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from .._interrupt import interruptible
from ..host import on_host
from ..law import LEVELS, Errors, errors_of_figures
from ..replica import Batch, tiles, without_graph
from ..step import (
    STEP_TILES,
    AbstractDecision,
    ConditionalExceedance,
    decide,
    last_tables,
    step_parts,
    times_or_chances,
)
from ._draw import Advance, Draws, parts, reservoirs
from ._prepare import Run


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of a run: how it was drawn, how its steps are decided, and their number, which is
    lower than requested after Ctrl-C.
    """

    draws: Draws
    decision: AbstractDecision
    steps: int


def decided_chunks(
    run: Run,
    draws: Sequence[Draws],
    *,
    exact: bool = False,
    num_replicas: int | None = None,
    advance: Advance = lambda steps: None,
) -> Iterator[Chunk]:
    """Draws the chunks of a run, one after the other, and decides their steps.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, after a last chunk of the steps drawn so far.
    """
    replicas = num_replicas or draws[0].sampling.num_replicas(run.program)
    with interruptible() as interrupt:
        for mine, reservoir, interrupted in reservoirs(run, draws, advance):
            kept = reservoir.replicas()
            if kept.drawn:
                steps = kept.drawn if interrupted else mine.steps
                decision = decide(
                    run.chances, kept, run.key, steps, num_replicas=replicas, exact=exact
                )
                # Drawn samples still become steps; a Ctrl-C during the decision ends the run later.
                interrupted |= interrupt.take()
                yield Chunk(mine, decision, steps)
            if interrupted:
                raise KeyboardInterrupt


def step_times(
    run: Run,
    chunks: Sequence[Chunk],
    exceedance: ConditionalExceedance | None = None,
    advance: Advance = lambda steps: None,
) -> Iterator[np.ndarray]:
    """The steps of consecutive chunks, a batch at a time, in order: their times, or the
    probabilities that they exceed a threshold.
    """
    for batch in step_tiles(run, chunks):
        times, _, of_steps = batch.arrays
        if exceedance is None:
            yield dataclasses.replace(batch, arrays=times).samples()
        else:
            of_steps = dataclasses.replace(batch, arrays=of_steps).samples()
            tables = last_tables(run.plan.tables)
            yield np.asarray(on_host(times_or_chances, tables, of_steps, exceedance))
        advance(batch.count)


def step_tiles(run: Run, chunks: Sequence[Chunk]) -> Iterator[Batch]:
    """What `step_tile` gives for the steps of consecutive chunks."""
    last = np.cumsum([chunk.steps for chunk in chunks])
    plan, first_id = run.plan, chunks[0].decision.kept.first

    def inputs(first, count):
        ids = np.arange(first, first + count, dtype=np.uint32)
        # With room for all sinks, and copied once.
        ends = np.zeros((count, len(plan.structure.sinks.first)), plan.dtype)
        regimes = np.zeros(count, np.int32)
        start = 0
        for k, begin, end in parts(last, first - first_id, count):
            some = slice(start, start + end - begin)
            mine, regimes[some] = chunks[k].decision.inputs(begin, end - begin)
            ends[some, : mine.shape[1]] = mine
            start = some.stop
        return ids, ends, regimes

    shared, total = (without_graph(plan), run.key), int(last[-1])
    return tiles(step_tile, shared, total, inputs, first=first_id, per_batch=STEP_TILES)


def step_tile(shared, _, ids, ends, regimes):
    """One tile: the times of steps, when each sink is reduced, `(steps, sinks)`, and the parts of
    steps. One function for all that is asked of steps, because it takes seconds to compile.
    """
    plan, key = shared
    ready, of_steps = step_parts(plan, ends.T, ids, key, regimes)
    return of_steps.times(), ready.T, of_steps


def errors_of(decision: AbstractDecision, steps: np.ndarray) -> Errors:
    """How the figures of a law scatter, from the first steps of a chunk, which are used up."""
    errors = decision.errors(len(steps))
    thresholds = np.quantile(steps.copy(), LEVELS, overwrite_input=True)
    levels, support = zip(*(errors.of_level(steps, t) for t in thresholds), strict=True)
    # In place from here on.
    steps -= np.mean(steps, dtype=np.float64).astype(steps.dtype)
    mean = errors.of_mean(steps)
    spread = np.std(steps, dtype=np.float64).astype(steps.dtype)
    steps *= steps
    steps -= spread**2
    steps /= 2 * spread if spread > 0 else 1
    return errors_of_figures(
        [mean, errors.of_mean(steps), *levels], errors.support(), np.array(support)
    )
