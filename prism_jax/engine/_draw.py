"""Drawing the samples of one replica, or of all, that the stretches of a run are made of."""

import dataclasses
import itertools as it
import math
from collections.abc import Callable

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
    - `lead`: the leading axes, unless it is plain.
    - `first`, `steps`: the stretch's steps.
    - `explicit`: whether all replicas of each step are simulated.
    - `allocation`: the number of the GPUs that explicit replicas run on in all of its steps; by
        default each step has others.
    """

    sampling: str
    lead: Lead | None
    first: int
    steps: int
    explicit: bool = False
    allocation: int | None = None

    @property
    def replicas(self) -> int:
        """How many replica samples are drawn. Those of importance sampling cost up to three times
        as much, so a quarter of them takes no longer.
        """
        return -(-self.steps // 4) if self.sampling == "importance" else self.steps


def find_lead(run: Run, sampling: str) -> Lead | None:
    """The leading axes, where the sampling needs them."""
    if sampling == "plain":
        return None
    importance = sampling == "importance"
    return leading_axes(run.program, run.plan, pilot_key(), importance=importance)


def pilot_key() -> PRNGKeyArray:
    return jax.random.key(_PILOT_SEED)


def all_draws(
    run: Run, num_samples: int, *, explicit: bool = False, allocations: int | None = None
) -> list[Draws]:
    """The draws of the stretches of a run whose way of sampling is chosen.

    Each stretch is a run of its own, and the law is that of all their steps. Stretches keep all
    their replica samples, so that long runs sharpen the whole law. With more replicas a stretch is
    longer, to reach far enough into the tail: of its samples only the first and the slowest are
    kept. An allocation of GPUs is a stretch of its own.
    """
    number, num_replicas = 1, run.program.num_replicas
    if allocations is not None:
        number = allocations
    elif run.sampling == "sobol":
        number = min(RANDOMISATIONS, num_samples)
    elif run.sampling == "plain":
        # A short stretch leans: by R / 2 over its length, in the logarithm of the chance that no
        # replica is slower. All samples that steps reach are kept up to the second length.
        reach = math.sqrt(2 * num_replicas * num_samples)
        reach = max(reach, num_replicas * EXTREMES / 25)
        number = math.ceil(num_samples / max(RESERVOIR, min(reach, num_samples)))
    ends = [num_samples * i // number for i in range(number + 1)]
    return [
        Draws(run.sampling, run.lead, first, last - first, explicit, i if allocations else None)
        for i, (first, last) in enumerate(it.pairwise(ends))
    ]


def draw(run: Run, draws: Draws, reservoir: Reservoir, advance: Advance) -> None:
    """Draws the samples of a stretch into a reservoir."""
    (_draw_explicit if draws.explicit else _draw_one)(run, draws, reservoir, advance)


def _draw_one(run: Run, draws: Draws, reservoir: Reservoir, advance: Advance) -> None:
    """Draws samples of one replica."""
    shared = (run.plan, draws.lead, run.key)
    points = sobol_points(run, draws)

    def inputs(start, count):
        return () if points is None else (points[start - draws.first :][:count],)

    size = tiles_of(run.plan)
    for batch in tiles(
        _replica_tile, shared, draws.replicas, inputs, first=draws.first, per_batch=size
    ):
        ends, *rest = batch.samples()
        reservoir.add(batch.ids, ends[:, : run.program.num_ranks], *rest)
        advance(batch.count * draws.steps // draws.replicas)


def _replica_tile(shared, ids, *points):
    """One tile: ends `(samples, ranks)`, score, stratum and likelihood."""
    plan, lead, key = shared
    given, likelihood = given_scores(lead, ids, key, *points)
    sampled = by_strata(plan, ids, given)
    ends = replica_ends(plan, sampled, key)
    score = jnp.max(ends + mean_reductions(plan)[:, sampled.regimes], axis=0)
    return ends.T, score, stratum_of(plan.structure.strata, ids), likelihood


def sobol_points(run: Run, draws: Draws) -> np.ndarray | None:
    """The scores of the leading axes of one stretch of a run, where they are quasi-random."""
    if draws.sampling != "sobol" or draws.lead is None:
        return None
    seed = (*(int(word) for word in np.asarray(run.key)), draws.first)
    room = len(draws.lead.direction)
    return sobol_scores(num_axes(run.program), room, draws.steps, seed, run.plan.dtype)


def _draw_explicit(run: Run, draws: Draws, reservoir: Reservoir, advance: Advance) -> None:
    """Simulates all replicas of each step; the latest end of each pipeline rank is kept, as if it
    were the one replica of a step.
    """
    replicas, ranks = run.program.num_replicas, run.program.num_ranks
    regime = run.chances.regime
    first_of = np.array([np.argmax(regime == g) for g in range(regime.max() + 1)], np.int32)
    rest = np.zeros((0, ranks), run.plan.dtype), np.zeros(0, np.int32)
    allocation = None if draws.allocation is None else np.uint32(draws.allocation)
    for batch in tiles(
        _explicit_tile,
        (run.plan, run.key, allocation),
        draws.steps * replicas,
        first=draws.first * replicas,
        per_batch=tiles_of(run.plan),
    ):
        ends, regimes = batch.samples()
        ends = np.concatenate([rest[0], ends[:, :ranks]])
        regimes = np.concatenate([rest[1], regimes])
        steps = len(ends) // replicas
        rest = ends[steps * replicas :], regimes[steps * replicas :]
        if not steps:
            continue
        latest = ends[: steps * replicas].reshape(steps, replicas, -1).max(axis=1)
        stratum = first_of[regimes[: steps * replicas : replicas]]
        begin = draws.first + reservoir.drawn
        ids = np.arange(begin, begin + steps, dtype=np.uint32)
        reservoir.add(ids, latest, latest.max(axis=1), stratum, np.ones(steps, np.float32))
        advance(steps)


def _explicit_tile(shared, ids):
    """One tile: ends `(samples, ranks)`, and the regime of each sample's step."""
    plan, key, allocation = shared
    number = plan.structure.num_replicas
    regimes, _ = regimes_and_stalls(plan.structure.strata, ids // number)
    gpu_ids = None if allocation is None else allocation * number + ids % number
    stalls = poisson_stalls(plan, ids, key)
    ends = replica_ends(plan, Sampled(ids, regimes, stalls, gpu_ids=gpu_ids), key)
    return ends.T, regimes
