"""Derivatives of figures of the step time with respect to a program's parameters.

Three ways lead from a parameter to a step: through the ends of the replica that decides it, through
the step's own draws (factor, reductions, tail), and through the weights of samples, which
depend on the rates of stalls and on the network. The samples are not stored; they are drawn again.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._progress import progress_bar
from ..program import Program
from ..random import Stream, fold
from ..replica import (
    Plan,
    by_strata,
    given_scores,
    gradient_of,
    gradients_of,
    interruptible,
    replica_ends,
    tile_size,
    tiles,
    tiles_of,
    without_graph,
)
from ..step import (
    AbstractOneDecides,
    OneEach,
    Over,
    SlowestOf,
    VectorRule,
    last_spreads,
    steps_of,
)
from ._check import check_num_samples
from ._draw import Advance, all_draws, sobol_points
from ._pool import pooled
from ._prepare import Run, prepare
from ._run import Stretch, composed, decided_stretches, step_tiles
from ._sampling import led
from ._weights import through_weights


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
    - `whole`: `(n,)`, these steps.
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

    With `like`, steps of a program of the same graph, they are drawn along the same leading axes:
    see `led`. See `composed_run` for `batches` and `unlike`.
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
    """Simulates steps of a run that is prepared, by the vector rule: one replica decides each, and
    derivatives go through that one. See `vector_rule_notes` for where this is not as good.

    With `unlike`, so many of the replicas are those of another run, whose program has the same
    graph; such steps have no derivative.

    **Arguments:**

    - `num_samples`: in all batches, each of which has as many; its steps are decided by samples of
        its own.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C: a figure of some of the steps would not say so.
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
    """Stretches of which each step is the slower one of two decisions."""

    def slower(stretch: Stretch, their: Stretch) -> Stretch:
        decision = their.decision
        assert isinstance(decision, OneEach | VectorRule)
        deal = dataclasses.replace(decision.deal, shuffled=True)
        decision = dataclasses.replace(decision, deal=deal)
        return dataclasses.replace(stretch, decision=SlowestOf((stretch.decision, decision)))

    return tuple(slower(*both) for both in zip(stretches, theirs, strict=True))


def given_the_rest(composed_: Composed, threshold: float, narrowest: float) -> Composed | None:
    """The same steps as probabilities to take longer than a threshold, given all draws of a step
    but its last.

    **Arguments:**

    - `composed_`: from `composed_steps`.
    - `threshold`: in seconds.
    - `narrowest`: the least that the last draw must spread a step by, in seconds.

    **Returns:**

    What was composed; `None` where neither the step factor nor the tail spread it so far.
    """
    run = composed_.run
    spreads = last_spreads(without_graph(run.plan), float(np.median(composed_.steps)))
    last = max(spreads, key=lambda name: spreads[name], default=None)
    if last is None or spreads[last] <= narrowest:
        return None
    over = Over(jnp.asarray(threshold, run.plan.dtype), last)
    return _of(run, composed_.stretches, composed_.pools, composed_.batches, over)


def pull_back(
    composed_: Composed, slope: Float[np.ndarray, " n"], influence: Float[np.ndarray, " n"]
) -> Program:
    """The derivative of a figure with respect to the parameters of the program that was simulated.

    **Arguments:**

    - `slope`: of the figure with respect to each of `composed_.steps`.
    - `influence`: of the figure with respect to the logarithm of each step's weight.

    **Returns:**

    A program whose parameters are the derivatives; `None` in place of what is not a float.
    """
    of_stretches = _of_stretches(composed_, slope, influence)
    return gradient_of(composed_.run.program, ft.reduce(_sum, of_stretches))


def pull_back_batches(
    composed_: Composed, slope: Float[np.ndarray, " n"], influence: Float[np.ndarray, " n"]
) -> list[Program]:
    """What each batch contributes to `pull_back`, which is the sum of these."""
    of_stretches = _of_stretches(composed_, slope, influence)
    number = len(composed_.stretches) // composed_.batches
    batches = (it.islice(of_stretches, number) for _ in range(composed_.batches))
    return gradients_of(composed_.run.program, [ft.reduce(_sum, batch) for batch in batches])


def _sum(one, other):
    return jax.tree.map(np.add, one, other)


def _of_stretches(composed_: Composed, slope, influence) -> Iterator[Any]:
    """What each stretch contributes, with respect to the plan's tables."""
    run = composed_.run
    for stretch in composed_.stretches:
        mine = slice(stretch.draws.first, stretch.draws.first + stretch.draws.steps)
        of_tables = jax.tree.map(lambda x: np.zeros(x.shape), run.plan.tables)
        of_tables, of_ends = _through_steps(composed_, stretch, slope[mine], of_tables)
        of_tables = _through_replicas(run, stretch, of_ends, of_tables)
        yield through_weights(run, stretch, influence[mine], of_tables)


def _through_steps(composed_: Composed, stretch: Stretch, slope, of_tables):
    """Back through the composition of steps, to the plan and to the kept samples' ends."""
    run, decision = composed_.run, stretch.decision
    assert isinstance(decision, AbstractOneDecides)
    start, sinks = decision.kept.first, run.program.sinks.number
    of_ends = np.zeros(decision.kept.ends.shape)

    def inputs(first, count):
        return (slope[first : first + count].astype(run.plan.dtype),)

    shared = (without_graph(run.plan), run.key, composed_.over)
    for batch in step_tiles(_step_vjp, shared, [stretch], inputs):
        tables_share, ends_share = batch.arrays
        of_tables = dataclasses.replace(batch, arrays=tables_share).added_to(of_tables)
        of_steps = dataclasses.replace(batch, arrays=ends_share).samples()
        samples = decision.samples(batch.first - start, batch.count)
        step, sink = np.nonzero(of_steps[:, :sinks])  # Mostly one each.
        np.add.at(of_ends, (samples[step], sink), of_steps[step, sink])
    return of_tables, of_ends


def _step_vjp(shared, ids, ends, regimes, slope):
    plan, key, over = shared

    def forward(tables, ends):
        return steps_of(dataclasses.replace(plan, tables=tables), ends.T, ids, key, regimes, over)

    _, vjp = jax.vjp(forward, plan.tables, ends)
    return vjp(slope)


def _through_replicas(run: Run, stretch: Stretch, of_ends, of_tables):
    """Back through the samples of a replica that steps depend on, to the plan.

    Each pair of a sample and a sink that decides with it goes back along one path.
    """
    draws, kept = stretch.draws, stretch.decision.kept
    needed, sink = np.nonzero(of_ends)
    points = sobol_points(run, draws)

    def inputs(first, count):
        some = slice(first, first + count)
        ids = kept.ids[needed[some]]
        given = () if points is None else (points[ids - np.uint32(draws.first)],)
        weight = of_ends[needed[some], sink[some]].astype(kept.ends.dtype)
        return ids, sink[some].astype(np.int32), weight, *given

    shared = (run.plan, draws.lead, run.key)
    options = {"per_batch": tiles_of(run.plan), "size": tile_size(len(needed))}
    for batch in tiles(_replica_vjp, shared, len(needed), inputs, **options):
        of_tables = batch.added_to(of_tables)
    return of_tables


def _replica_vjp(shared, _, ids, sink, weight, *points):
    plan: Plan
    plan, lead, key = shared
    given, _ = given_scores(lead, ids, key, *points)

    def forward(tables):
        whole = dataclasses.replace(plan, tables=tables)
        return replica_ends(whole, by_strata(plan, ids, given), key)

    ends, vjp = jax.vjp(forward, plan.tables)
    mine = jnp.arange(len(ends), dtype=jnp.int32)[:, None] == sink[None, :]
    return vjp(jnp.where(mine, weight[None, :], 0))[0]
