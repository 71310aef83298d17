"""A run: what is drawn of a program in parts, what decides the steps of each, and the steps."""

import dataclasses
import itertools as it
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from ..law import FEWEST, LEVELS, Errors
from ..program import Program
from ..random import KeyData, key_data
from ..replica import (
    Lead,
    Plan,
    Sampled,
    by_strata,
    given_scores,
    interruptible,
    leading_axes,
    make_plan,
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
    RESERVOIR,
    STEP_TILES,
    AbstractDecision,
    Chances,
    Over,
    Reservoir,
    chances_of,
    decide,
    steps_of,
)
from ._check import check_plan, check_program


# The pilot that sets the grid always uses this key, so that results of other keys can be merged.
_PILOT_SEED = 0
_PILOT_SAMPLES = 4096

# Independent scramblings of the Sobol points.
RANDOMISATIONS = 16

Advance = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Run:
    """What all parts of a run have in common."""

    program: Program
    plan: Plan
    key: KeyData
    chances: Chances


def prepare(program: Program, key: PRNGKeyArray) -> Run:
    """Checks a program and a key, and computes what is needed before any sample is drawn.

    **Raises:**

    `ValueError` for what is no program or key, or latencies that are impossible.
    """
    check_program(program, key)
    plan = make_plan(program)
    check_plan(program, plan)
    return Run(program, plan, key_data(key), chances_of(program, plan))


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the replica samples of one part of a run are drawn.

    **Attributes:**

    - `sampling`: `"plain"`, `"importance"` or `"sobol"`.
    - `lead`: the leading axes, unless it is plain.
    - `first`, `steps`: the part's steps.
    - `explicit`: whether all replicas of each step are simulated.
    - `allocation`: the number of the GPUs that explicit replicas run on in all steps of the part;
        by default each step has others.
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


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a run: how it was drawn, what decides its steps, and how many there are: fewer
    than asked for after Ctrl-C.
    """

    draws: Draws
    decision: AbstractDecision
    steps: int


def automatic_sampling(program: Program, num_samples: int, *, explicit: bool = False) -> str:
    """Importance sampling where the rule of replicas reaches beyond the samples."""
    beyond = -math.log(0.95) / program.num_replicas * num_samples
    known = explicit or program.num_replicas == 1 or beyond >= FEWEST
    return "plain" if known else "importance"


def find_lead(run: Run, sampling: str) -> Lead | None:
    """The leading axes, where the sampling needs them."""
    if sampling == "plain":
        return None
    importance = sampling == "importance"
    return leading_axes(run.program, run.plan, pilot_key(), importance=importance)


def pilot_key() -> PRNGKeyArray:
    return jax.random.key(_PILOT_SEED)


def all_draws(
    program: Program,
    num_samples: int,
    sampling: str,
    lead: Lead | None,
    *,
    explicit: bool = False,
    allocations: int | None = None,
) -> list[Draws]:
    """The draws of the parts of a run.

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
    return [
        Draws(sampling, lead, first, last - first, explicit, i if allocations else None)
        for i, (first, last) in enumerate(it.pairwise(ends))
    ]


def decided_parts(
    run: Run,
    draws: Sequence[Draws],
    *,
    exact: bool = False,
    num_replicas: int | None = None,
    advance: Advance = lambda steps: None,
) -> Iterator[Part]:
    """Draws the parts of a run, one after the other, and decides their steps.

    **Raises:**

    `KeyboardInterrupt` after Ctrl-C, and after the steps drawn so far were given as a last part.
    """
    replicas = run.program.num_replicas if num_replicas is None else num_replicas
    with interruptible() as interrupt:
        for mine in draws:
            rows = mine.steps if mine.explicit else mine.replicas
            of_strata, ranks = len(run.program.strata), run.program.num_ranks
            reservoir = Reservoir(ranks, of_strata, run.plan.dtype, mine.first, rows)
            try:
                (_draw_explicit if mine.explicit else _draw)(run, mine, reservoir, advance)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            kept = reservoir.replicas()
            if kept.drawn:
                steps = kept.drawn if interrupted else mine.steps
                number = 1 if mine.explicit else replicas
                decision = decide(
                    run.chances, kept, run.key, steps, num_replicas=number, exact=exact
                )
                # What was drawn is to be composed; Ctrl-C while it was decided ends the run then.
                interrupted |= interrupt.came
                interrupt.came = False
                yield Part(mine, decision, steps)
            if interrupted:
                raise KeyboardInterrupt


def _draw(run: Run, draws: Draws, reservoir: Reservoir, advance: Advance) -> None:
    """Draws samples of one replica."""
    shared = (run.plan, draws.lead, run.key)
    points = sobol_points(run, draws)

    def inputs(start, count):
        return () if points is None else (points[start - draws.first :][:count],)

    size = tiles_of(run.program.num_ops)
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
    """The scores of the leading axes of one part of a run, where they are quasi-random."""
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
        per_batch=tiles_of(run.program.num_ops),
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


def composed(
    run: Run, part: Part, over: Over | None = None, advance: Advance = lambda steps: None
) -> Iterator[np.ndarray]:
    """The steps of a part, a batch at a time, in order: their times, or the probabilities that they
    are over a threshold.
    """
    inputs = step_inputs(run, part)
    shared = (run.plan, run.key, over)
    first = part.decision.kept.first
    for batch in tiles(_step_tile, shared, part.steps, inputs, first=first, per_batch=STEP_TILES):
        yield batch.samples()
        advance(batch.count)


def step_inputs(run: Run, part: Part) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
    """What decides the steps from an id on: ends, with room for all ranks, and regimes."""
    room = run.plan.structure.ranks

    def inputs(first, count):
        ends, regimes = part.decision.inputs(first, count)
        padding = np.zeros((count, room - ends.shape[1]), ends.dtype)
        return np.concatenate([ends, padding], axis=1) if padding.size else ends, regimes

    return inputs


def _step_tile(shared, ids, ends, regimes):
    plan, key, over = shared
    return steps_of(plan, ends.T, ids, key, regimes, over)


def pilot(run: Run) -> np.ndarray:
    """A few steps by a key of their own, plainly sampled."""
    run = dataclasses.replace(run, key=key_data(pilot_key()))
    draws = Draws("plain", None, 0, _PILOT_SAMPLES)
    return np.concatenate(
        [steps for part in decided_parts(run, [draws]) for steps in composed(run, part)]
    )


def errors_of(decision: AbstractDecision, steps: np.ndarray) -> Errors:
    """The standard errors of a law, from the first steps of a part, which are used up."""
    errors = decision.errors(len(steps))
    thresholds = np.quantile(steps.copy(), LEVELS, overwrite_input=True)
    levels = [errors.of_level(steps, t) for t in thresholds]
    # In place from here on.
    steps -= np.mean(steps, dtype=np.float64).astype(steps.dtype)
    mean = errors.of_mean(steps)
    spread = np.std(steps, dtype=np.float64).astype(steps.dtype)
    steps *= steps
    steps -= spread**2
    steps /= 2 * spread if spread > 0 else 1
    return Errors(
        mean=mean,
        std=errors.of_mean(steps),
        support=errors.support(),
        levels=np.array([error for error, _ in levels]),
        level_support=np.array([support for _, support in levels]),
    )
