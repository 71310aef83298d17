"""Simulated steps, with all that is needed to simulate them again."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._progress import progress_bar
from ..program import Program
from ..random import Stream, fold
from ..replica import (
    interruptible,
    without_graph,
)
from ..step import (
    OneEach,
    Over,
    SlowestOf,
    VectorRule,
    last_spreads,
)
from ._check import check_num_samples
from ._draw import Advance, all_draws
from ._pool import pooled
from ._prepare import Run, prepare
from ._run import Stretch, composed, decided_stretches
from ._sampling import led


@dataclasses.dataclass(frozen=True)
class Composed:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64; with `over`, probabilities.
    - `run`: the simulation.
    - `stretches`: how each stretch of it was drawn, and what decided its steps.
    - `over`: see [`Over`][].
    - `batches`: how many batches of as many steps each are independent of each other.
    - `pools`: what decides the steps where batches are not kept apart.
    - `whole`: `(n,)`, the steps of these batches.
    """

    steps: Float[np.ndarray, " n"]
    run: Run
    stretches: tuple[Stretch, ...]
    pools: tuple[Stretch, ...]
    whole: Float[np.ndarray, " n"]
    over: Over | None = None
    batches: int = 1


def composed_steps(
    program: Program,
    *,
    num_samples: int,
    key: PRNGKeyArray,
    batches: int = 1,
    like: Composed | None = None,
    unlike: tuple[Program, int] | None = None,
    progress: bool = False,
) -> Composed:
    """Simulates steps by the vector rule of replicas, and keeps their times and the samples that
    decide them.

    With `like`, steps of a program with the same graph, samples are drawn along the same leading
    axes: see `led`. See `composed_run` for `batches` and `unlike`.
    """
    num_samples = check_num_samples(num_samples)
    run = led(prepare(program, key), num_samples // batches, like and like.run)
    other = unlike and (prepare(unlike[0], key), unlike[1])
    # Each sample is drawn, then composed.
    with progress_bar(2 * num_samples, progress, "steps", "sample") as advance:
        options: dict[str, Any] = {"batches": batches, "unlike": other, "advance": advance}
        return composed_run(run, num_samples=num_samples, **options)


def composed_run(
    run: Run,
    *,
    num_samples: int,
    batches: int = 1,
    unlike: tuple[Run, int] | None = None,
    advance: Advance = lambda steps: None,
) -> Composed:
    """Simulates steps of a prepared run by the vector rule: one replica decides each step, and
    derivatives go through it. See `vector_rule_notes` for where this is inaccurate.

    With `unlike`, a number of the replicas are those of another run, whose program has the same
    graph. Such steps have no derivative.

    **Arguments:**

    - `num_samples`: the number of steps in all batches together. Batches have equally many steps,
        which are decided by samples of their own.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, because a figure could not say that it is of fewer steps.
    """
    num_samples, program = check_num_samples(num_samples), run.program
    with interruptible():
        run = led(run, num_samples // batches)
        draws = all_draws(run, num_samples, batches=batches)
        number = program.num_replicas - (unlike[1] if unlike else 0)
        stretches = tuple(decided_stretches(run, draws, num_replicas=number, advance=advance))
        pools = pooled(run, stretches, number) if batches > 1 else stretches
        if unlike is not None:
            other = dataclasses.replace(unlike[0], key=fold(run.key, Stream.UNLIKE))
            theirs = tuple(decided_stretches(other, draws, num_replicas=unlike[1]))
            their_pools = pooled(other, theirs, unlike[1]) if batches > 1 else theirs
            stretches, pools = _slower_of(stretches, theirs), _slower_of(pools, their_pools)
        return _of(run, stretches, pools, batches, advance=advance)


def _of(
    run: Run,
    stretches: tuple[Stretch, ...],
    pools: tuple[Stretch, ...],
    batches: int,
    over: Over | None = None,
    advance: Advance = lambda steps: None,
) -> Composed:
    def steps_of(stretches, advance=lambda steps: None):
        return np.concatenate([*composed(run, stretches, over, advance)]).astype(np.float64)

    steps = steps_of(stretches, advance)
    # Where there is one replica, each sample is a step, in whatever stretch it is.
    same = pools is stretches or all(isinstance(one.decision, OneEach) for one in stretches)
    whole = steps if same else steps_of(pools)
    return Composed(steps, run, stretches, pools, whole, over, batches)


def first_batches_of(composed_: Composed, number: int) -> Composed:
    """The first few batches."""
    some = composed_.stretches[: len(composed_.stretches) * number // composed_.batches]
    pools = pooled(composed_.run, some, composed_.run.program.num_replicas)
    return _of(composed_.run, some, pools, number, composed_.over)


def _slower_of(stretches: tuple[Stretch, ...], theirs: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """Stretches in which each step is the slower of two decisions."""

    def slower(stretch: Stretch, their: Stretch) -> Stretch:
        decision = their.decision
        assert isinstance(decision, OneEach | VectorRule)
        deal = dataclasses.replace(decision.deal, shuffled=True)
        decision = dataclasses.replace(decision, deal=deal)
        return dataclasses.replace(stretch, decision=SlowestOf((stretch.decision, decision)))

    return tuple(slower(*both) for both in zip(stretches, theirs, strict=True))


def given_the_rest(composed_: Composed, threshold: float, narrowest: float) -> Composed | None:
    """The same steps as probabilities of taking longer than a threshold, given all draws of a step
    except the last.

    **Arguments:**

    - `composed_`: from `composed_steps`.
    - `threshold`: in seconds.
    - `narrowest`: by how much, in seconds, the last draw must at least spread a step.

    **Returns:**

    The probabilities; `None` if neither the step factor nor the tail spreads a step so far.
    """
    run = composed_.run
    spreads = last_spreads(without_graph(run.plan), float(np.median(composed_.steps)))
    last = max(spreads, key=lambda name: spreads[name], default=None)
    if last is None or spreads[last] <= narrowest:
        return None
    over = Over(jnp.asarray(threshold, run.plan.dtype), last)
    return _of(run, composed_.stretches, composed_.pools, composed_.batches, over)
