"""Simulated steps, with all that is needed to simulate them again."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._misc import dot
from .._progress import progress_bar
from ..program import Program
from ..random import Stream, fold
from ..replica import (
    interruptible,
    without_graph,
)
from ..step import (
    AbstractWeighed,
    OneEach,
    Over,
    SlowestOf,
    VectorRule,
    last_spreads,
)
from ._check import check_num_samples
from ._choose import sampled
from ._draw import Advance, all_draws
from ._prepare import Run, prepare
from ._run import Stretch, composed, decided_stretches


@dataclasses.dataclass(frozen=True)
class Composed:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64; with `over`, probabilities.
    - `run`: the simulation.
    - `stretches`: how each stretch of it was drawn, and what decided its steps.
    - `over`: see [`Over`][].
    """

    steps: Float[np.ndarray, " n"]
    run: Run
    stretches: tuple[Stretch, ...]
    over: Over | None = None


def composed_steps(
    program: Program,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    like: Composed | None = None,
    unlike: tuple[Program, int] | None = None,
    margin: int = 1,
    progress: bool = False,
) -> Composed:
    """Simulates steps by the vector rule of replicas, and keeps their times and the samples that
    decide them.

    With `like`, steps of a program with the same graph, samples are drawn along the same leading
    axes: see `sampled`. See `composed_run` for `unlike`.

    **Arguments:**

    - `margin`: the sampling is chosen as if so many times fewer steps were wanted.
    """
    num_samples = check_num_samples(num_samples)
    run = sampled(prepare(program, key), max(num_samples // margin, 1), like and like.run)
    other = unlike and (prepare(unlike[0], key), unlike[1])
    # Each sample is drawn, then composed.
    with progress_bar(2 * num_samples, progress, "steps", "sample") as advance:
        return composed_run(run, num_samples=num_samples, unlike=other, advance=advance)


def composed_run(
    run: Run,
    *,
    num_samples: int,
    unlike: tuple[Run, int] | None = None,
    advance: Advance = lambda steps: None,
) -> Composed:
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
        stretches = tuple(decided_stretches(run, draws, num_replicas=number, advance=advance))
        if unlike is not None:
            other = dataclasses.replace(unlike[0], key=fold(run.key, Stream.UNLIKE))
            theirs = tuple(decided_stretches(other, draws, num_replicas=unlike[1]))
            stretches = _slower_of(stretches, theirs)
        return _of(run, stretches, advance=advance)


def _of(
    run: Run,
    stretches: tuple[Stretch, ...],
    over: Over | None = None,
    advance: Advance = lambda steps: None,
) -> Composed:
    steps = np.concatenate([*composed(run, stretches, over, advance)]).astype(np.float64)
    return Composed(steps, run, stretches, over)


class Again(NamedTuple):
    """Simulated steps with new weights of the replica samples.

    **Attributes:**

    - `composed`: steps that pick samples anew.
    - `own`: the weight of each of these, for their own draws.
    - `counts`: the weight of each step that keeps its sample.
    """

    composed: Composed
    own: Float[np.ndarray, " n"]
    counts: Float[np.ndarray, " n"]


def resample(composed_: Composed) -> Iterator[Again]:
    """The steps with new weights of the replica samples, several times. Where steps pick samples
    anew, what programs with common random numbers have in common cancels in differences. A step is
    then taken to be later by as much as the score of its sample; probabilities are computed again.
    """
    decisions = [_weighed(stretch) for stretch in composed_.stretches]
    before = np.concatenate([one.scores() for one in decisions])
    for each in zip(*(one.resample() for one in decisions), strict=True):
        pairs = zip(composed_.stretches, each, strict=True)
        stretches = tuple(dataclasses.replace(one, decision=new.decision) for one, new in pairs)
        if composed_.over is None:
            after = np.concatenate([new.decision.scores() for new in each])
            steps = composed_.steps + (after - before)
            again = dataclasses.replace(composed_, steps=steps, stretches=stretches)
        else:
            again = _of(composed_.run, stretches, composed_.over)
        weights = (np.concatenate(x) for x in zip(*(new[1:] for new in each), strict=True))
        yield Again(again, *weights)


def support(composed_: Composed, values: Float[np.ndarray, " n"]) -> float:
    """How many replica samples of equal weight would be worth as much as those behind a sum over
    steps.

    **Arguments:**

    - `values`: what each step contributes. Infinite if that is nothing.
    """
    total = squares = 0.0
    for stretch in composed_.stretches:
        first = stretch.draws.first
        each = _weighed(stretch).of_samples(values[first : first + stretch.steps])
        total, squares = total + float(each.sum()), squares + dot(each, each)
    return total**2 / squares if squares > 0 else math.inf


def _weighed(stretch: Stretch) -> AbstractWeighed:
    assert isinstance(stretch.decision, AbstractWeighed)
    return stretch.decision


def _slower_of(stretches: tuple[Stretch, ...], theirs: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """Stretches in which each step is the slower of two decisions."""

    def slower(stretch: Stretch, their: Stretch) -> Stretch:
        decision = their.decision
        assert isinstance(decision, OneEach | VectorRule)
        deal = dataclasses.replace(decision.deal, shuffled=True)
        decision = dataclasses.replace(decision, deal=deal)
        return dataclasses.replace(stretch, decision=SlowestOf((_weighed(stretch), decision)))

    return tuple(slower(*both) for both in zip(stretches, theirs, strict=True))


def last_draw(composed_: Composed, narrowest: float) -> str | None:
    """Which draw of a step may be left open: the step factor or the tail, whichever spreads steps
    further; `None` if neither spreads a typical step by more than `narrowest` seconds.
    """
    plan = without_graph(composed_.run.plan)
    spreads = last_spreads(plan, float(np.median(composed_.steps)))
    last = max(spreads, key=lambda name: spreads[name], default=None)
    return None if last is None or spreads[last] <= narrowest else last


def given_the_rest(composed_: Composed, threshold: float, last: str) -> Composed:
    """The same steps as probabilities of taking longer than a threshold in seconds, given all draws
    of a step except `last`: see `last_draw`.
    """
    run = composed_.run
    over = Over(jax.device_put(np.asarray(threshold, run.plan.dtype)), last)
    return _of(run, composed_.stretches, over)
