"""Runs: prepares a program, draws the samples of chunks, decides their steps, and composes them."""

import dataclasses
import functools as ft
import itertools as it
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import check_interrupt, interruptible, working
from ..host import on_host
from ..program import Program
from ..random import KeyData, key_data
from ..replica import Batch, Plan, make_plan, on_all_devices, tiles, without_ops
from ..step import (
    BLOCK,
    STEP_TILES,
    AbstractDecision,
    Chances,
    ConditionalExceedance,
    Reservoir,
    StepParts,
    chances_of,
    decide,
    last_tables,
    step_parts,
    times_or_chances,
)
from ._check import check_plan, check_program


if TYPE_CHECKING:
    from ._sampling import AbstractSampling

Advance = Callable[[int], object]
Inputs = Callable[[int, int], tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The common data of all chunks of a run.

    **Attributes:**

    - `sampling`: how replica samples are drawn; `None` until this is chosen.
    """

    program: Program
    plan: Plan
    key: KeyData
    chances: Chances
    sampling: "AbstractSampling | None" = None

    @ft.cached_property
    def plan_of_steps(self) -> Plan:
        """What all batches of steps share, on all devices."""
        return on_all_devices(without_ops(self.plan))


def prepare(program: Program, key: "jax.Array") -> Run:
    """Checks a program and a key, and computes what is needed before any sample is drawn.

    **Raises:**

    `ValueError` if an argument is not a program or a key, or if latencies are not valid.
    """
    check_interrupt()
    check_program(program, key)
    with working():
        plan = make_plan(program)
        check_plan(program, plan)
        return Run(program, plan, key_data(key), chances_of(program, plan))


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the samples of one chunk of a run are drawn.

    **Attributes:**

    - `sampling`: the way that they are drawn in.
    - `first`, `steps`: the first step of the chunk, and its number of steps.
    """

    sampling: "AbstractSampling"
    first: int
    steps: int

    @property
    def replicas(self) -> int:
        """How many samples are drawn."""
        return self.sampling.replicas(self.steps)


def all_draws(run: Run, num_samples: int) -> list[Draws]:
    """The draws of the chunks of a run whose sampling has been chosen.

    A chunk keeps all of its samples, so that longer runs make the whole law more accurate. With
    more replicas, chunks are longer, to reach far enough into the tail; only the first and the
    slowest samples are then kept.
    """
    assert run.sampling is not None
    number = run.sampling.chunks(run.program, num_samples)
    ends = [num_samples * i // number for i in range(number + 1)]
    return [Draws(run.sampling, first, last - first) for first, last in it.pairwise(ends)]


def parts(ends: np.ndarray, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Splits a range of positions in consecutive chunks: the number of each chunk, and the
    range in it.

    **Arguments:**

    - `ends`: where each chunk ends.
    """
    last = first + count
    for k in range(int(np.searchsorted(ends, first, "right")), len(ends)):
        begin = int(ends[k - 1]) if k else 0
        if begin >= last:
            return
        yield k, max(first, begin) - begin, min(last, int(ends[k])) - begin


def ids_of(draws: Sequence[Draws], first: int, count: int) -> np.ndarray:
    """The ids of a range of the samples of chunks, which stand one after the other."""
    ends = np.cumsum([mine.replicas for mine in draws])
    return np.concatenate(
        [
            np.arange(draws[k].first + begin, draws[k].first + end, dtype=np.uint32)
            for k, begin, end in parts(ends, first, count)
        ]
    )


def by_chunk(
    draws: Sequence[Draws], samples: Iterable[tuple[np.ndarray, ...]]
) -> Iterator[tuple[np.ndarray, ...]]:
    """The samples of chunks, at most one chunk at a time, with their ids."""
    ends, start = np.cumsum([mine.replicas for mine in draws]), 0
    for some in samples:
        ids, done = ids_of(draws, start, len(some[0])), 0
        for _, begin, end in parts(ends, start, len(ids)):
            whole, mine = end - begin == len(ids), slice(done, done + end - begin)
            yield (ids, *some) if whole else tuple(x[mine] for x in (ids, *some))
            done = mine.stop
        start += len(ids)


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
    num_replicas: int | None = None,
    advance: Advance = lambda steps: None,
) -> Iterator[Chunk]:
    """Draws the chunks of a run, one after the other, and decides their steps.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, after a last chunk of the steps drawn so far.
    """
    replicas = num_replicas or draws[0].sampling.num_replicas(run.program)
    of_strata, sinks = len(run.program.strata), run.program.sinks.number
    samples = by_chunk(draws, draws[0].sampling.samples(run, draws))
    with interruptible() as interrupt:
        for mine in draws:
            reservoir = Reservoir(sinks, of_strata, run.plan.dtype, mine.first, mine.replicas)
            interrupted = False
            try:
                while reservoir.drawn < mine.replicas:
                    ids, ends, *others = map(np.asarray, next(samples))
                    reservoir.add(ids, ends[:, :sinks], *others)
                    advance(len(ids) * mine.steps // mine.replicas)
            except KeyboardInterrupt:
                interrupted = True
            kept = reservoir.replicas()
            if kept.drawn:
                steps = kept.drawn if interrupted else mine.steps
                decision = decide(run.chances, kept, run.key, steps, num_replicas=replicas)
                # Drawn samples still become steps; a Ctrl-C during the decision ends the run later.
                interrupted |= interrupt.take()
                yield Chunk(mine, decision, steps)
            if interrupted:
                raise KeyboardInterrupt


def step_times(
    run: Run, chunks: Sequence[Chunk], advance: Advance = lambda steps: None
) -> Iterator[np.ndarray]:
    """The times of the steps of consecutive chunks, a batch at a time, in order."""
    for batch in step_tiles(run, chunks):
        yield batch.samples(operator.itemgetter(0))
        advance(batch.count)


def parts_of(batches: Iterable[Batch]) -> StepParts:
    """What steps consist of, on the host, from what `step_tile` gives."""
    parts = [batch.samples(operator.itemgetter(2)) for batch in batches]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def chances(
    run: Run, parts: StepParts, exceedance: ConditionalExceedance
) -> Float[np.ndarray, " steps"]:
    """The probability of each step that it exceeds a threshold."""
    last, found = last_tables(run.plan.tables), []
    for start in range(0, len(parts.barrier), BLOCK):  # In little memory.
        some = jax.tree.map(lambda x, start=start: x[start : start + BLOCK], parts)
        found.append(on_host(times_or_chances, last, some, exceedance))
    return np.concatenate(found).astype(np.float64)


def step_tiles(run: Run, chunks: Sequence[Chunk]) -> Iterator[Batch]:
    """What `step_tile` gives for the steps of chunks, one chunk after the other."""
    last = np.cumsum([chunk.steps for chunk in chunks])
    plan = run.plan

    def inputs(first, count):
        ids = np.zeros(count, np.uint32)
        # With room for all sinks, and copied once.
        ends = np.zeros((count, len(plan.structure.sinks.first)), plan.dtype)
        regimes = np.zeros(count, np.int32)
        start = 0
        for k, begin, end in parts(last, first, count):
            some = slice(start, start + end - begin)
            ids[some] = np.arange(begin, end) + chunks[k].decision.kept.first
            mine, regimes[some] = chunks[k].decision.inputs(begin, end - begin)
            ends[some, : mine.shape[1]] = mine
            start = some.stop
        return ids, ends, regimes

    return composed(run, int(last[-1]), inputs)


def composed(run: Run, number: int, inputs: Inputs) -> Iterator[Batch]:
    """What `step_tile` gives for so many steps, from their ids, their ends with room for all sinks,
    and their regimes.
    """
    shared = run.plan_of_steps, run.key
    return tiles(step_tile, shared, number, inputs, per_batch=STEP_TILES)


def step_tile(shared, _, ids, ends, regimes):
    """One tile: the times of steps, when each sink is reduced, `(steps, sinks)`, and the parts of
    steps. One function for all that is asked of steps, because it takes seconds to compile.
    """
    plan, key = shared
    ready, of_steps = step_parts(plan, ends.T, ids, key, regimes)
    return of_steps.times(), ready.T, of_steps
