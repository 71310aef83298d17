"""Draws the samples of one replica, or of all replicas, for the stretches of a run."""

import dataclasses
import itertools as it
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from ..replica import (
    Lead,
    Sampled,
    by_strata,
    given_scores,
    leading_axes,
    mean_reductions,
    num_axes,
    poisson_stalls,
    regimes_and_stalls,
    replica_ends,
    sobol_scores,
    stratum_of,
    tiles,
    tiles_of,
)
from ..step import (
    EXTREMES,
    RESERVOIR,
    Reservoir,
)
from ._prepare import Run


# The pilots that find the leading axes and set the grid always use this key, so that results of
# other keys can be merged.
_PILOT_SEED = 0

# Independent scramblings of the Sobol points.
RANDOMISATIONS = 16

Advance = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the replica samples of one stretch of a run are drawn.

    **Attributes:**

    - `sampling`: `"plain"`, `"importance"` or `"sobol"`.
    - `lead`: the leading axes, unless sampling is plain.
    - `first`, `steps`: the first step of the stretch, and its number of steps.
    - `explicit`: whether all replicas of each step are simulated.
    - `allocation`: the number of the allocation of GPUs that explicit replicas run on in all steps;
        by default, each step has its own GPUs.
    """

    sampling: str
    lead: Lead | None
    first: int
    steps: int
    explicit: bool = False
    allocation: int | None = None

    @property
    def replicas(self) -> int:
        """How many replica samples are drawn. Importance sampling costs up to three times as much
        per sample, so a quarter as many samples takes no longer.
        """
        return -(-self.steps // 4) if self.sampling == "importance" else self.steps


def find_lead(run: Run, sampling: str) -> Lead | None:
    """The leading axes, if the sampling needs them."""
    if sampling == "plain":
        return None
    importance = sampling == "importance"
    return leading_axes(run.program, run.plan, pilot_key(), importance=importance)


def pilot_key() -> PRNGKeyArray:
    return jax.random.key(_PILOT_SEED)


def all_draws(
    run: Run,
    num_samples: int,
    *,
    explicit: bool = False,
    allocations: int | None = None,
) -> list[Draws]:
    """The draws of the stretches of a run whose sampling has been chosen.

    Stretches are independent, and the law is that of all their steps. A stretch keeps all of its
    replica samples, so that longer runs make the whole law more accurate. With more replicas,
    stretches are longer, to reach far enough into the tail; only the first and the slowest samples
    are then kept. Each allocation of GPUs is a stretch of its own.
    """
    number, num_replicas, steps = 1, run.program.num_replicas, num_samples
    if allocations is not None:
        number = allocations
    elif run.sampling == "sobol":
        number = min(RANDOMISATIONS, steps)
    elif run.sampling == "plain":
        # A short stretch leans: by R / 2 over its length, in the logarithm of the chance that no
        # replica is slower. All samples that steps reach are kept up to the second length.
        reach = math.sqrt(2 * num_replicas * steps)
        reach = max(reach, num_replicas * EXTREMES / 25)
        number = math.ceil(steps / max(RESERVOIR, min(reach, steps)))
    ends = [num_samples * i // number for i in range(number + 1)]
    return [
        Draws(run.sampling, run.lead, first, last - first, explicit, i if allocations else None)
        for i, (first, last) in enumerate(it.pairwise(ends))
    ]


def reservoirs(
    run: Run, draws: Sequence[Draws], advance: Advance
) -> Iterator[tuple[Draws, Reservoir, bool]]:
    """Draws the samples of stretches, each into a reservoir, and returns whether Ctrl-C cut it
    short; then it is the last.
    """
    pieces = (_explicit if draws[0].explicit else _of_one_replica)(run, draws)
    for mine in draws:
        rows = mine.steps if mine.explicit else mine.replicas
        of_strata, sinks = len(run.program.strata), run.program.sinks.number
        reservoir = Reservoir(sinks, of_strata, run.plan.dtype, mine.first, rows)
        try:
            while reservoir.drawn < rows:
                piece = next(pieces)
                reservoir.add(*piece)
                advance(len(piece[0]) * mine.steps // rows)
        except KeyboardInterrupt:
            yield mine, reservoir, True
            return
        yield mine, reservoir, False


def _of_one_replica(run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
    """Samples of one replica, at most one stretch at a time. Short stretches share tiles."""
    if draws[0].sampling == "sobol" and len(draws) > 1:  # Each stretch has points of its own.
        for mine in draws:
            yield from _of_one_replica(run, [mine])
        return
    ends = np.cumsum([mine.replicas for mine in draws])
    points = sobol_points(run, draws[0])

    def ids_of(first, count):
        """In parts, one for each stretch."""
        for k, start, end in parts(ends, first, count):
            id_ = draws[k].first + start
            yield np.arange(id_, id_ + end - start, dtype=np.uint32)

    def inputs(first, count):
        ids = np.concatenate([*ids_of(first, count)])
        return (ids,) if points is None else (ids, points[first : first + count])

    shared = (run.plan, draws[0].lead, run.key)
    total, size = int(ends[-1]), tiles_of(run.plan)
    for batch in tiles(_replica_tile, shared, total, inputs, per_batch=size):
        samples, start = batch.samples(), 0
        for ids in ids_of(batch.first, batch.count):
            latest, *rest = (x[start : start + len(ids)] for x in samples)
            yield ids, latest[:, : run.program.sinks.number], *rest
            start += len(ids)


def parts(ends: np.ndarray, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Splits a range of positions in consecutive stretches: the number of each stretch, and the
    range in it.

    **Arguments:**

    - `ends`: where each stretch ends.
    """
    last = first + count
    for k in range(int(np.searchsorted(ends, first, "right")), len(ends)):
        begin = int(ends[k - 1]) if k else 0
        if begin >= last:
            return
        yield k, max(first, begin) - begin, min(last, int(ends[k])) - begin


def _replica_tile(shared, _, ids, *points):
    """One tile: ends `(samples, sinks)`, score, stratum and likelihood."""
    plan, lead, key = shared
    given, likelihood = given_scores(lead, ids, key, *points)
    sampled = by_strata(plan, ids, given)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    return ends.T, score, stratum_of(plan.structure.strata, ids), likelihood


def sobol_points(run: Run, draws: Draws) -> np.ndarray | None:
    """The quasi-random scores of the leading axes of one stretch, if sampling uses them."""
    if draws.sampling != "sobol" or draws.lead is None:
        return None
    seed = (*(int(word) for word in np.asarray(run.key)), draws.first)
    room = len(draws.lead.direction)
    return sobol_scores(num_axes(run.program), room, draws.steps, seed, run.plan.dtype)


def _explicit(run: Run, draws: Sequence[Draws]) -> Iterator[tuple[np.ndarray, ...]]:
    """All replicas of each step. The latest end of each sink represents them, as if a step had a
    single replica.
    """
    replicas, sinks = run.program.num_replicas, run.program.sinks.number
    regime = run.chances.regime
    first_of = np.array([np.argmax(regime == g) for g in range(regime.max() + 1)], np.int32)
    for mine in draws:
        rest = np.zeros((0, sinks), run.plan.dtype), np.zeros(0, np.int32)
        allocation = None if mine.allocation is None else np.uint32(mine.allocation)
        begin = mine.first
        for batch in tiles(
            _explicit_tile,
            (run.plan, run.key, allocation),
            mine.steps * replicas,
            first=mine.first * replicas,
            per_batch=tiles_of(run.plan),
        ):
            ends, regimes = batch.samples()
            ends = np.concatenate([rest[0], ends[:, :sinks]])
            regimes = np.concatenate([rest[1], regimes])
            steps = len(ends) // replicas
            rest = ends[steps * replicas :], regimes[steps * replicas :]
            if not steps:
                continue
            latest = ends[: steps * replicas].reshape(steps, replicas, -1).max(axis=1)
            stratum = first_of[regimes[: steps * replicas : replicas]]
            ids = np.arange(begin, begin + steps, dtype=np.uint32)
            begin += steps
            yield ids, latest, latest.max(axis=1), stratum, np.ones(steps, np.float32)


def _explicit_tile(shared, ids):
    """One tile: ends `(samples, sinks)`, and the regime of each sample's step."""
    plan, key, allocation = shared
    number = plan.structure.num_replicas
    regimes, _ = regimes_and_stalls(plan.structure.strata, ids // number)
    gpu_ids = None if allocation is None else allocation * number + ids % number
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, gpu_ids=gpu_ids), key)
    return ends.T, regimes
