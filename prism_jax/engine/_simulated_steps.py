"""Simulated steps, with all that is needed to simulate them again, or without some samples."""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from .._interrupt import interruptible, working
from .._misc import dot
from .._progress import progress_bar
from ..host import on_host
from ..program import Program
from ..random import Stream, fold
from ..replica import without_graph
from ..step import Composed, ConditionalExceedance, Decided, Pool, Room, last_spreads, sample_group
from ._check import check_num_samples
from ._pilot import sampled
from ._pools import (
    Drawn,
    PooledSteps,
    drawn_pools,
    pool_draws,
    pool_of,
    pooled_steps,
    room_of,
    steps_that_look,
)
from ._run import Advance, Run, chances, prepare


class Deciders(NamedTuple):
    """The samples that decide steps.

    **Attributes:**

    - `ids`: `(n,)`, those of the samples; `group`: `(n,)`, their groups.
    - `stratum`, `regime`: `(n,)`.
    - `ends`: `(n, sinks)`, when each sink of the sample ends, in seconds, with room for more.
    - `sink`: `(n,)`, the sink that decides.
    """

    ids: np.ndarray
    group: np.ndarray
    stratum: np.ndarray
    regime: np.ndarray
    ends: np.ndarray
    sink: np.ndarray


@dataclasses.dataclass(frozen=True)
class SimulatedSteps:
    """Simulated steps and all that is needed to simulate them again.

    **Attributes:**

    - `steps`: `(n,)` step times in seconds, float64; with `exceedance`, probabilities.
    - `without`: the same without the replica that decides each step; all `nan` of one replica.
    - `kind`: `(n,)`: steps of a kind are those of a pool that have one regime of the network, in
        the order of their ranks; or, if there is one replica, those of a stratum. Without the
        sample that decides it, a step ends as those of its kind with about its rank do.
    - `decides`: `(samples,)`, how many steps of each kind a sample decides on average over what
        rank the first step has; by kinds, the slowest first. `groups`: `(samples,)`, its group.
    - `composed`: what steps consist of.
    - `deciders`: the samples that decide them.
    - `run`: the simulation.
    - `exceedance`: see [`ConditionalExceedance`][].
    """

    steps: Float[np.ndarray, " n"]
    without: Float[np.ndarray, " n"]
    kind: Int[np.ndarray, " n"]
    decides: Float[np.ndarray, " samples"]
    groups: Int[np.ndarray, " samples"]
    composed: Composed
    deciders: Deciders
    run: Run
    exceedance: ConditionalExceedance | None = None


def simulated_steps(
    program: Program,
    *,
    num_samples: int,
    key: "jax.Array",
    like: SimulatedSteps | None = None,
    unlike: tuple[Program, int] | None = None,
    progress: bool = False,
) -> SimulatedSteps:
    """Simulates steps, and keeps their times and the samples that decide them.

    With `like`, steps of a program with the same graph, samples are drawn along the same leading
    axes: see `sampled`. With `unlike`, a number of the replicas are those of another program with
    the same graph; all of them have the network of the first. Such steps have no derivative.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, because a figure could not say that it is of fewer steps.
    """
    num_samples = check_num_samples(num_samples)
    with working():
        before = like and like.run
        run = sampled(prepare(program, key, before), num_samples, before)
        unlike_run = unlike and (prepare(unlike[0], key, run), unlike[1])
    # Each sample is drawn, then decides steps; unlike ones, too, are drawn.
    total = (2 if unlike_run is None else 3) * num_samples
    with progress_bar(total, progress, "steps", "sample") as advance, interruptible():
        return steps_of_run(run, num_samples, unlike_run, advance)


def steps_of_run(
    run: Run,
    num_samples: int,
    unlike: tuple[Run, int] | None = None,
    advance: Advance = lambda steps: None,
    law_steps: int = 0,
) -> SimulatedSteps:
    """`simulated_steps` of a run with its way of sampling. If it shares compiled code with a law,
    `law_steps` are those of the law.
    """
    draws = pool_draws(run, num_samples)
    room = room_of(run, pool_draws(run, max(num_samples, law_steps)))
    groups = [run]
    if unlike is not None:
        unlike_run, number = unlike
        chances = dataclasses.replace(unlike_run.chances, network=run.chances.network)
        changed = {"key": on_host(fold, run.key, Stream.UNLIKE), "chances": chances}
        unlike_run = sampled(unlike_run, num_samples, run)
        groups = [
            dataclasses.replace(run, num_replicas=run.num_replicas - number),
            dataclasses.replace(unlike_run, num_replicas=number, **changed),
        ]
    pools_of = (drawn_pools(group, pool_draws(group, num_samples), advance) for group in groups)
    parts = []
    for number, drawn in enumerate(zip(*pools_of, strict=True)):
        steps = steps_that_look(run, ft.partial(_steps, groups, drawn, room, number))
        advance(steps.number)
        pools, (decided, composed) = steps.pools, steps.on_host()
        ends = np.cumsum([len(pool.ends) for pool in pools])
        of_pool = np.searchsorted(ends, decided.decider, side="right")
        by_rank = np.asarray(pools[0].decides), sample_group(np.asarray(pools[0].ids))
        deciders = _deciders(pools, drawn, decided, composed)
        parts.append((decided, composed, deciders, of_pool, by_rank))
    decided, composed, deciders, of_pool, by_rank = jax.tree.map(
        lambda *x: np.concatenate(x), *parts
    )
    times, without = (x.astype(np.float64) for x in (decided.times, decided.without))
    kind = deciders.stratum.astype(np.int64)
    if not np.isnan(without).all():
        # How many steps each regime has is set; and steps of near ranks in the first of unlike
        # pools have any rank in the others.
        number = np.repeat(np.arange(len(draws)), [pool.steps for pool in draws])
        kind = (number * len(run.chances.network) + deciders.regime) * len(groups) + of_pool
    decides, of_group = by_rank
    if len(groups) > 1 or run.num_replicas == 1:  # How many a sample decides is not known.
        decides, of_group = np.ones(len(times)), deciders.group[np.argsort(kind, kind="stable")]
    return SimulatedSteps(times, without, kind, decides, of_group, composed, deciders, run)


def _steps(
    groups: Sequence[Run],
    drawn: Sequence[Drawn],
    room: Room,
    number: int,
    looks: int,
) -> PooledSteps:
    """The steps of one pool of each group of unlike replicas."""
    pools = tuple(
        pool_of(group, samples, looks, room, number)
        for group, samples in zip(groups, drawn, strict=True)
    )
    # The ranks of a step among unlike replicas are independent, but for the network's regime.
    run = groups[0]
    ranks = [_shuffled(run, pools[0], drawn[0], k) for k in range(1, len(pools))]
    return pooled_steps(run, pools, drawn[0].steps, ranks=ranks)


def _deciders(
    pools: Sequence[Pool], drawn: Sequence[Drawn], decided: Decided, composed: Composed
) -> Deciders:
    ids, ends, strata = [], [], []
    for pool, samples in zip(pools, drawn, strict=True):
        ids.append(np.asarray(pool.ids))
        ends.append(np.asarray(pool.ends))
        stratum = np.asarray(samples.samples[2])
        number = ids[-1] - np.uint32(samples.draws.first)  # There is room for more.
        strata.append(stratum[np.minimum(number, len(stratum) - 1)])
    ids, ends, stratum = (np.concatenate(x)[decided.decider] for x in (ids, ends, strata))
    sink, regime = np.asarray(decided.sink), np.asarray(composed.regime)
    return Deciders(ids, sample_group(ids), stratum, regime, ends, sink)


def _shuffled(run: Run, pool: Pool, drawn: Drawn, number: int) -> np.ndarray:
    """The ranks of steps in random order, but each in its regime of the network."""
    seed = [int(word) for word in np.asarray(run.key)]
    counter = [0, 0, number, drawn.draws.first]
    rng = np.random.Generator(np.random.Philox(key=seed, counter=counter))
    slowest, starts = np.asarray(pool.slowest)[: drawn.steps], np.asarray(pool.starts)
    bounds = [0, *np.searchsorted(slowest, starts).tolist(), drawn.steps]
    ranks = [start + rng.permutation(end - start) for start, end in it.pairwise(bounds)]
    return np.concatenate(ranks).astype(np.int32)


def support(simulated: SimulatedSteps, values: Float[np.ndarray, " n"]) -> float:
    """How many replica samples of equal weight would be worth as much as those behind a sum over
    steps.

    **Arguments:**

    - `values`: what each step contributes. Infinite if that is nothing.
    """
    _, sample = np.unique(simulated.deciders.ids, return_inverse=True)
    of_samples = np.bincount(sample, values)
    squares = dot(of_samples, of_samples)
    return float(of_samples.sum()) ** 2 / squares if squares > 0 else math.inf


def last_draw(simulated: SimulatedSteps, at: float, narrowest: float) -> str | None:
    """Which draw of a step may be left open: the step factor or the tail, whichever spreads steps
    further; `None` if neither spreads a step of `at` seconds by more than `narrowest` seconds.
    """
    plan = without_graph(simulated.run.plan)
    spreads = last_spreads(plan, at)
    last = max(spreads, key=lambda name: spreads[name], default=None)
    return None if last is None or spreads[last] <= narrowest else last


def conditional_exceedances(
    simulated: SimulatedSteps, threshold: float, last: str
) -> SimulatedSteps:
    """The same steps as probabilities of taking longer than a threshold in seconds, given all draws
    of a step except `last`: see `last_draw`.
    """
    at = jax.device_put(np.asarray(threshold, simulated.run.plan.dtype))
    exceedance, parts = ConditionalExceedance(at, last), simulated.composed.parts
    barrier = simulated.composed.without
    there = ~np.isnan(barrier)
    steps = chances(simulated.run, parts, exceedance)
    barrier = np.where(there, barrier, parts.barrier)
    parts_without = eqx.tree_at(lambda parts: parts.barrier, parts, barrier)
    without = np.where(there, chances(simulated.run, parts_without, exceedance), np.nan)
    return dataclasses.replace(simulated, steps=steps, without=without, exceedance=exceedance)
