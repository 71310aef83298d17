"""Drawing the samples of one replica, or of all replicas, that a run is made of."""

import dataclasses
import itertools as it
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..law import FEWEST
from ..program import Program
from ._lead import Lead, leading_axes, shifted_scores, sobol_scores
from ._plan import Plan
from ._random import KeyData
from ._replica import poisson_stalls, replica_ends, strata_of, stratum_of
from ._replicas import RESERVOIR, Replicas, Reservoir
from ._step import mean_reductions
from ._tiles import map_tiles, tiles_of, untile


# The pilot that sets the grid always uses this key, so that results of other keys can be merged.
_PILOT_SEED = 0

# Independent scramblings of the Sobol points.
RANDOMISATIONS = 16

_mean_reductions_jit = eqx.filter_jit(mean_reductions)


def pilot_key():
    return jax.random.key(_PILOT_SEED)


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the replica samples of one part of a run are drawn.

    **Attributes:**

    - `sampling`: `"plain"`, `"importance"` or `"sobol"`.
    - `lead`: the leading axes, unless it is plain.
    - `first`, `steps`: the part's steps.
    - `allocation`: the number of the GPUs that explicit replicas run on in all steps of the part;
        by default each step has others.
    """

    sampling: str
    lead: Lead | None
    first: int
    steps: int
    allocation: int | None = None

    @property
    def replicas(self) -> int:
        """How many replica samples are drawn. Those of importance sampling cost up to three times
        as much, so a quarter of them takes no longer.
        """
        return -(-self.steps // 4) if self.sampling == "importance" else self.steps


def automatic_sampling(program: Program, num_samples: int, replicas: str) -> str:
    """Importance sampling where the rule of replicas reaches beyond the samples."""
    beyond = -math.log(0.95) / program.num_replicas * num_samples
    known = replicas == "explicit" or program.num_replicas == 1 or beyond >= FEWEST
    return "plain" if known else "importance"


def parts(
    program: Program, num_samples: int, sampling: str, allocations: int | None = None
) -> list[tuple[int, int]]:
    """The parts of a run, as first step and number of steps.

    Each part is a run of its own, and the law is that of all their steps. Parts keep all their
    replica samples, so that long runs sharpen the whole law. With many replicas a part would not
    reach far enough into the tail: then there is one part, and of its samples only the first and
    the slowest are kept. An allocation of GPUs is a part of its own.
    """
    number = 1
    if allocations is not None:
        number = allocations
    elif sampling == "sobol":
        number = min(RANDOMISATIONS, num_samples)
    elif sampling == "plain" and program.num_replicas * num_samples <= RESERVOIR**2 / 2:
        number = -(-num_samples // RESERVOIR)
    ends = [num_samples * i // number for i in range(number + 1)]
    return [(first, last - first) for first, last in it.pairwise(ends)]


def draw_replicas(
    plan: Plan, key: KeyData, draws: Draws, advance=lambda steps: None
) -> tuple[Replicas, bool]:
    """Draws samples of one replica, and says whether all: Ctrl-C ends it early."""
    dtype = plan.mean.dtype
    program, first = plan.program, draws.first
    reservoir = Reservoir(program.num_ranks, len(program.strata), dtype, first, draws.replicas)
    shared = (plan, _mean_reductions_jit(plan), draws.lead, key)
    points = sobol_points(draws, key, dtype)

    def inputs(start, count):
        return () if points is None else (points[start - first :][:count],)

    def keep(start, count, result):
        reservoir.add(np.arange(start, start + count, dtype=np.uint32), *untile(result))
        advance(count * draws.steps // draws.replicas)

    finished = map_tiles(
        _replica_tile,
        shared,
        draws.replicas,
        keep,
        inputs,
        first=first,
        tiles=tiles_of(program.num_ops),
    )
    return reservoir.replicas(), finished


def _replica_tile(shared, ids, *points):
    """One tile of `draw_replicas`: ends `(samples, ranks)`, score, stratum and likelihood."""
    plan, reductions, lead, key = shared
    regimes, stalls = strata_of(plan.program, ids)
    given, likelihood = given_scores(lead, ids, key, *points)
    ends = replica_ends(plan, ids, key, regimes, stalls, given)
    score = jnp.max(ends + reductions[:, regimes], axis=0)
    return ends.T, score, stratum_of(plan.program, ids), likelihood


def find_lead(plan: Plan, sampling: str) -> Lead | None:
    """The leading axes, where the way of sampling needs them."""
    if sampling == "plain":
        return None
    return leading_axes(plan, pilot_key(), importance=sampling == "importance")


def sobol_points(draws: Draws, key: KeyData, dtype) -> np.ndarray | None:
    """The scores of the leading axes of one part of a run, where they are quasi-random."""
    if draws.sampling != "sobol" or draws.lead is None:
        return None
    seed = (*(int(word) for word in np.asarray(key)), draws.first)
    return sobol_scores(draws.lead.direction.shape[0], draws.steps, seed, dtype)


def given_scores(lead: Lead | None, ids, key: KeyData, *points):
    """The scores that are given for a tile, as of `replica_ends`, and the samples' likelihoods."""
    likelihood = jnp.ones(ids.shape, jnp.float32)
    if lead is None:
        return None, likelihood
    if points:
        return (lead.axes, points[0].T), likelihood
    scores, likelihood = shifted_scores(lead, ids, key)
    return (lead.axes, scores), likelihood.astype(jnp.float32)


def explicit_replicas(
    plan: Plan, key: KeyData, draws: Draws, advance=lambda steps: None
) -> tuple[Replicas, bool]:
    """Simulates all replicas of each step; the latest end of each pipeline rank is kept, as if it
    were the one replica of a step. Says whether all: Ctrl-C ends it early.
    """
    replicas, ranks = plan.program.num_replicas, plan.program.num_ranks
    strata = plan.program.strata
    first_of = np.zeros(1 + max(s.regime for s in strata), np.int32)
    for i, s in reversed(list(enumerate(strata))):
        first_of[s.regime] = i
    reservoir = Reservoir(ranks, len(strata), plan.mean.dtype, draws.first, draws.steps)
    rest = np.zeros((0, ranks), plan.mean.dtype), np.zeros(0, np.int32)

    def keep(start, count, result):
        nonlocal rest
        del start, count
        rest = tuple(map(np.concatenate, zip(rest, untile(result), strict=True)))
        steps = len(rest[0]) // replicas
        if not steps:
            return
        ready = [x[: steps * replicas].reshape(steps, replicas, -1) for x in rest]
        rest = tuple(x[steps * replicas :] for x in rest)
        ends, stratum = ready[0].max(axis=1), first_of[ready[1][:, 0, 0]]
        begin = draws.first + reservoir.drawn
        ids = np.arange(begin, begin + steps, dtype=np.uint32)
        reservoir.add(ids, ends, np.max(ends, axis=1), stratum, np.ones(steps, np.float32))
        advance(steps)

    finished = map_tiles(
        _explicit_tile,
        (plan, key, None if draws.allocation is None else np.uint32(draws.allocation)),
        draws.steps * replicas,
        keep,
        first=draws.first * replicas,
        tiles=tiles_of(plan.program.num_ops),
    )
    return reservoir.replicas(), finished


def _explicit_tile(shared, ids):
    """One tile: ends `(samples, ranks)`, and the regime of each sample's step."""
    plan, key, allocation = shared
    number = np.uint32(plan.program.num_replicas)
    regimes, _ = strata_of(plan.program, ids // number)
    gpu_ids = None if allocation is None else allocation * number + ids % number
    stalls = poisson_stalls(plan.program, ids, key)
    ends = replica_ends(plan, ids, key, regimes, stalls, gpu_ids=gpu_ids)
    return ends.T, regimes
