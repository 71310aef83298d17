"""Simulated steps, with all that is needed to simulate them again."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from .._interrupt import interruptible, progress_bar
from .._misc import dot
from ..host import on_host
from ..program import Program
from ..random import Stream, fold
from ..replica import without_graph
from ..step import (
    AbstractWeighed,
    ConditionalExceedance,
    OneEach,
    Resampled,
    SlowestOf,
    StepParts,
    VectorRule,
    last_spreads,
)
from ._check import check_num_samples
from ._pilot import sampled
from ._run import (
    Advance,
    Chunk,
    Run,
    all_draws,
    chances,
    decided_chunks,
    parts_of,
    prepare,
    step_tiles,
    step_times,
)


@dataclasses.dataclass(frozen=True)
class SimulatedSteps:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64; with `exceedance`, probabilities.
    - `run`: the simulation.
    - `chunks`: how each chunk of it was drawn, and what decided its steps.
    - `exceedance`: see [`ConditionalExceedance`][].
    """

    steps: Float[np.ndarray, " n"]
    run: Run
    chunks: tuple[Chunk, ...]
    exceedance: ConditionalExceedance | None = None


def simulated_steps(
    program: Program,
    *,
    num_samples: int,
    key: "jax.Array",
    like: SimulatedSteps | None = None,
    unlike: tuple[Program, int] | None = None,
    margin: int = 1,
    progress: bool = False,
) -> SimulatedSteps:
    """Simulates steps by the vector rule of replicas, and keeps their times and the samples that
    decide them.

    With `like`, steps of a program with the same graph, samples are drawn along the same leading
    axes: see `sampled`. See `steps_of_run` for `unlike`.

    **Arguments:**

    - `margin`: the sampling is chosen as if so many times fewer steps were wanted.
    """
    num_samples = check_num_samples(num_samples)
    run = sampled(prepare(program, key), max(num_samples // margin, 1), like and like.run)
    other = unlike and (prepare(unlike[0], key), unlike[1])
    # Each sample is drawn, then decides steps.
    with progress_bar(2 * num_samples, progress, "steps", "sample") as advance:
        return steps_of_run(run, num_samples=num_samples, unlike=other, advance=advance)


def steps_of_run(
    run: Run,
    *,
    num_samples: int,
    unlike: tuple[Run, int] | None = None,
    advance: Advance = lambda steps: None,
) -> SimulatedSteps:
    """Simulates steps of a prepared run by the vector rule: one replica decides each step, and
    derivatives go through it. See `vector_rule_notes` for where this is inaccurate.

    With `unlike`, a number of the replicas are those of another run, whose program has the same
    graph. Such steps have no derivative.

    **Arguments:**

    - `num_samples`: the number of steps.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, because a figure could not say that it is of fewer steps.
    """
    num_samples, program = check_num_samples(num_samples), run.program
    with interruptible():
        run = sampled(run, num_samples)
        draws = all_draws(run, num_samples)
        number = program.num_replicas - (unlike[1] if unlike else 0)
        chunks = tuple(decided_chunks(run, draws, num_replicas=number, advance=advance))
        if unlike is not None:
            other = dataclasses.replace(unlike[0], key=on_host(fold, run.key, Stream.UNLIKE))
            theirs = tuple(decided_chunks(other, draws, num_replicas=unlike[1]))
            chunks = _slower_of(chunks, theirs)
        return _of(run, chunks, advance=advance)


def _of(
    run: Run, chunks: tuple[Chunk, ...], advance: Advance = lambda steps: None
) -> SimulatedSteps:
    steps = np.concatenate([*step_times(run, chunks, advance)]).astype(np.float64)
    return SimulatedSteps(steps, run, chunks)


class Again(NamedTuple):
    """Simulated steps with new weights of the replica samples.

    **Attributes:**

    - `simulated`: steps that pick samples anew.
    - `chunks`: the new weights in each chunk.
    """

    simulated: SimulatedSteps
    chunks: tuple[Resampled, ...]

    @property
    def own(self) -> Float[np.ndarray, " n"]:
        """The weight of each step that picks anew, for its own draws."""
        return np.concatenate([one.own for one in self.chunks])

    @property
    def counts(self) -> Float[np.ndarray, " n"]:
        """The weight of each step that keeps its sample."""
        return np.concatenate([one.counts() for one in self.chunks])


def resample(simulated: SimulatedSteps) -> Iterator[Again]:
    """The steps with new weights of the replica samples, several times. Where steps pick samples
    anew, what programs with common random numbers have in common cancels in differences. A step is
    then taken to be later by as much as the score of its sample; probabilities are computed again.
    """
    decisions = [_weighed(chunk) for chunk in simulated.chunks]
    before = np.concatenate([one.scores() for one in decisions])
    for each in zip(*(one.resample() for one in decisions), strict=True):
        pairs = zip(simulated.chunks, each, strict=True)
        chunks = tuple(dataclasses.replace(one, decision=new.decision) for one, new in pairs)
        if simulated.exceedance is None:
            after = np.concatenate([new.decision.scores() for new in each])
            steps = simulated.steps + (after - before)
        else:
            parts = parts_of(step_tiles(simulated.run, chunks))
            steps = chances(simulated.run, parts, simulated.exceedance)
        again = dataclasses.replace(simulated, steps=steps, chunks=chunks)
        yield Again(again, each)


def support(simulated: SimulatedSteps, values: Float[np.ndarray, " n"]) -> float:
    """How many replica samples of equal weight would be worth as much as those behind a sum over
    steps.

    **Arguments:**

    - `values`: what each step contributes. Infinite if that is nothing.
    """
    total = squares = 0.0
    for chunk in simulated.chunks:
        first = chunk.draws.first
        each = _weighed(chunk).of_samples(values[first : first + chunk.steps])
        total, squares = total + float(each.sum()), squares + dot(each, each)
    return total**2 / squares if squares > 0 else math.inf


def _weighed(chunk: Chunk) -> AbstractWeighed:
    assert isinstance(chunk.decision, AbstractWeighed)
    return chunk.decision


def _slower_of(chunks: tuple[Chunk, ...], theirs: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Stretches in which each step is the slower of two decisions."""

    def slower(chunk: Chunk, their: Chunk) -> Chunk:
        decision = their.decision
        assert isinstance(decision, OneEach | VectorRule)
        systematic = dataclasses.replace(decision.systematic, shuffled=True)
        decision = dataclasses.replace(decision, systematic=systematic)
        return dataclasses.replace(chunk, decision=SlowestOf((_weighed(chunk), decision)))

    return tuple(slower(*both) for both in zip(chunks, theirs, strict=True))


def last_draw(simulated: SimulatedSteps, at: float, narrowest: float) -> str | None:
    """Which draw of a step may be left open: the step factor or the tail, whichever spreads steps
    further; `None` if neither spreads a step of `at` seconds by more than `narrowest` seconds.
    """
    plan = without_graph(simulated.run.plan)
    spreads = last_spreads(plan, at)
    last = max(spreads, key=lambda name: spreads[name], default=None)
    return None if last is None or spreads[last] <= narrowest else last


def step_parts_of(simulated: SimulatedSteps) -> StepParts:
    """What simulated steps consist of, on the host."""
    return parts_of(step_tiles(simulated.run, simulated.chunks))


def conditional_exceedances(
    simulated: SimulatedSteps, parts: StepParts, threshold: float, last: str
) -> SimulatedSteps:
    """The same steps as probabilities of taking longer than a threshold in seconds, given all draws
    of a step except `last`: see `last_draw`; and what the steps consist of.
    """
    at = jax.device_put(np.asarray(threshold, simulated.run.plan.dtype))
    exceedance = ConditionalExceedance(at, last)
    steps = chances(simulated.run, parts, exceedance)
    return dataclasses.replace(simulated, steps=steps, exceedance=exceedance)
