"""`simulate`: the host loop over tiles."""

import dataclasses
import math
import time
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from ..program import Program, check_variability, digest, stall_probabilities, stall_rates
from ._accumulate import Accumulator, grid_of
from ._decide import Decision, decide
from ._law import FEWEST, Law
from ._lead import Lead, leading_axes, shifted_scores, sobol_scores
from ._merge import merge_parts, merge_randomisations
from ._plan import Plan, make_plan
from ._progress import progress_bar
from ._random import KeyData, key_data
from ._replica import poisson_stalls, replica_ends, strata_of, stratum_of
from ._replicas import RESERVOIR, Replicas, Reservoir
from ._step import compose_steps, mean_reductions
from ._tiles import map_tiles, untile


# The pilot that sets the grid always uses this key, so that results of other keys can be merged.
_PILOT_SEED = 0
_PILOT_SAMPLES = 4096

# Independent scramblings of the Sobol points.
RANDOMISATIONS = 16

# The cube of a normal is a fair picture of a sum of kernels up to this skewness.
MAX_SKEWNESS = 1.5
# The stratum with the most stalls stands for more of them too; their probability must not matter.
MAX_UNSEEN_STALLS = 1e-6

make_plan_jit = eqx.filter_jit(make_plan)
_mean_reductions_jit = eqx.filter_jit(mean_reductions)


def simulate(
    program: Program,
    *,
    num_samples: int = 1_000_000,
    key: PRNGKeyArray,
    replicas: Literal["vector", "exact", "explicit"] = "vector",
    sampling: Literal["auto", "plain", "importance", "sobol"] = "auto",
    progress: bool = False,
) -> Law:
    """Simulates steps and returns the law of the step time.

    Work runs in tiles of fixed size on all of JAX's devices. One key gives the same bits whatever
    the devices. What is kept of a run has a fixed size, whatever `num_samples`.

    **Arguments:**

    - `program`: what to simulate.
    - `num_samples`: how many steps (at least 1).
    - `key`: a `jax.random` key.
    - `replicas`: how the slowest of the data-parallel replicas is found. `"vector"` picks it from
        samples of one replica; `"exact"` does so for each pipeline rank apart (slower, a check);
        `"explicit"` simulates every replica of every step.
    - `sampling`: how replica samples are drawn. `"importance"` draws half of them slow, along the
        mean gradient of their end, and weighs them: for quantiles far out, and for more replicas
        than samples can show; it draws a quarter as many as there are steps. `"sobol"` takes
        quasi-random points for the axes that matter most, in 16 randomisations, whose scatter gives
        the intervals: for means. `"auto"` is plain, or importance sampling where fewer than 20
        samples would lie beyond the 95 % quantile of the slowest replica.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Law`][]. Ctrl-C ends the run early: the law is then of the steps so far, and says so.

    **Raises:**

    `ValueError` for a bad option, or a program whose latencies are not finite.
    """
    check_program(program)
    check_num_samples(num_samples)
    _check_options(program, num_samples, replicas, sampling)
    started = time.perf_counter()
    plan = make_plan_jit(program)
    check_plan(plan)
    words = key_data(key)
    way: str = sampling
    if way == "auto":
        way = automatic_sampling(program, num_samples, replicas)
    lead = find_lead(plan, way)
    grid = _pilot_grid(plan)
    compiled = time.perf_counter()

    explicit = replicas == "explicit"
    about = {"program": digest(program), "keys": (tuple(int(w) for w in words),)}
    laws: list[Law] = []
    like = None
    with progress_bar(2 * num_samples, progress) as advance:  # Drawn, then composed.
        for first, count in parts(program, num_samples, way):
            draws = Draws(way, lead, first, count)
            try:
                kept = (explicit_replicas if explicit else draw_replicas)(
                    plan, words, draws, advance
                )
                done = count if len(kept.ids) and kept.drawn >= draws.replicas else kept.drawn
                rule = "exact" if replicas == "exact" else "vector"
                decision = decide(program, kept, words, done, explicit=explicit, rule=rule)
                accumulator = compose(plan, decision, words, done, grid, advance)
            except KeyboardInterrupt:
                if not laws:
                    raise
                break
            laws.append(
                accumulator.law(
                    decision,
                    like if like and like.num_samples == accumulator.num_samples else None,
                    requested=count,
                    effective_samples=kept.effective_samples(),
                    compile_s=0.0,
                    run_s=0.0,
                    **about,
                )
            )
            like = laws[0] if like is None else like
            if accumulator.num_samples < count:
                break
            if len(laws) == RANDOMISATIONS and way != "sobol":
                laws = [merge_parts(laws)]  # So that memory stays flat.
        merge = merge_randomisations if way == "sobol" else merge_parts
        law = merge(laws)
    return dataclasses.replace(
        law,
        requested=num_samples,
        sampling=way,
        compile_s=compiled - started,
        run_s=time.perf_counter() - compiled,
    )


@dataclasses.dataclass(frozen=True)
class Draws:
    """How the replica samples of one part of a run are drawn.

    **Attributes:**

    - `sampling`: `"plain"`, `"importance"` or `"sobol"`.
    - `lead`: the leading axes, unless it is plain.
    - `first`, `steps`: the part's steps.
    """

    sampling: str
    lead: Lead | None
    first: int
    steps: int

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


def parts(program: Program, num_samples: int, sampling: str) -> list[tuple[int, int]]:
    """The parts of a run, as first step and number of steps.

    Each part is a run of its own, and the law is that of all their steps. Parts keep all their
    replica samples, so that long runs sharpen the whole law. With many replicas a part would not
    reach far enough into the tail: then there is one part, and of its samples only the first and
    the slowest are kept.
    """
    size = num_samples
    if sampling == "sobol":
        size = -(-num_samples // RANDOMISATIONS)
    elif sampling == "plain" and program.num_replicas * num_samples <= RESERVOIR**2 / 2:
        size = RESERVOIR
    return [(first, min(size, num_samples - first)) for first in range(0, num_samples, size)]


def _check_options(program, num_samples, replicas, sampling) -> None:
    if replicas not in ("vector", "exact", "explicit"):
        raise ValueError(f"`replicas={replicas!r}` must be 'vector', 'exact' or 'explicit'.")
    if sampling not in ("auto", "plain", "importance", "sobol"):
        raise ValueError(
            f"`sampling={sampling!r}` must be 'auto', 'plain', 'importance' or 'sobol'."
        )
    if replicas == "explicit":
        if sampling in ("importance", "sobol"):
            raise ValueError(
                f"`sampling={sampling!r}` draws samples of one replica, so it goes with "
                "`replicas='vector'` only."
            )
        if num_samples * program.num_replicas >= 2**32:
            raise ValueError(
                f"{num_samples} steps of {program.num_replicas} explicit replicas are too many; "
                "their product must be below 2^32."
            )
    if replicas == "exact" and sampling in ("importance", "sobol"):
        raise ValueError(f"`sampling={sampling!r}` goes with `replicas='vector'` only.")


def check_program(program) -> None:
    """Raises unless `program` is one whose values are known."""
    if not isinstance(program, Program):
        raise ValueError(
            f"A {type(program).__name__} was given in place of a program; use `compile_job` to get "
            "one."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(program)):
        raise ValueError(
            "`estimate` and `simulate` loop on the host and cannot be traced by `jax.jit` or "
            "`jax.vmap`; call them outside, or use `sample_replica_ends`, which can."
        )


def check_num_samples(num_samples) -> None:
    """Raises unless `num_samples` counts something."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer):
        raise ValueError(f"`num_samples={num_samples!r}` must be a whole number of at least 1.")
    if not 1 <= num_samples < 2**32:
        raise ValueError(f"`num_samples={num_samples}` must be at least 1 and below 2^32.")


def check_plan(plan: Plan) -> None:
    """Raises if some latency of the program is impossible, or is beyond what the plan can hold."""
    check_variability(plan.program.variability)
    moments = np.asarray(plan.moments[:2])
    finite = all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(plan))
    if not finite or (moments < 0).any() or (np.asarray(plan.mean) < 0).any():
        raise ValueError(
            "Some latency of the program is negative or not finite; check the means and the "
            "parameters of the laws (a negative or huge sigma does this)."
        )
    if plan.program.resolution == "block":
        skewness = max(
            np.abs(np.asarray(x)).max(initial=0) for x in (plan.moments[2], plan.skewness)
        )
        if skewness > MAX_SKEWNESS:
            raise ValueError(
                f"The kernels of a block have a summed latency of skewness {skewness:.2g}, and the "
                f"collapse of blocks is right up to {MAX_SKEWNESS}; lower their spread, describe "
                'what is rare and long as stalls, or use `resolution="kernel"`.'
            )
    if len(plan.program.stall_ops.value):
        rate = float(np.sum(stall_rates(plan.program)))
        probabilities = np.asarray(stall_probabilities(plan.program), float)
        unseen = probabilities[-1] * rate / len(probabilities)
        if unseen > MAX_UNSEEN_STALLS:
            raise ValueError(
                f"A replica's step has {rate:.2g} stalls on average, more than the program was "
                "compiled for; compile it with the new rate."
            )


def _pilot_key():
    return jax.random.key(_PILOT_SEED)


def _pilot_grid(plan: Plan) -> tuple[float, float]:
    words = key_data(_pilot_key())
    kept = draw_replicas(plan, words, Draws("plain", None, 0, _PILOT_SAMPLES))
    decision = decide(plan.program, kept, words, _PILOT_SAMPLES)
    steps: list[np.ndarray] = []
    run_steps(plan, decision, words, _PILOT_SAMPLES, steps.append)
    return grid_of(np.concatenate(steps))


def draw_replicas(plan: Plan, key: KeyData, draws: Draws, advance=lambda steps: None) -> Replicas:
    """Draws samples of one replica. Ctrl-C ends it early."""
    dtype = plan.mean.dtype
    program, first = plan.program, draws.first
    reservoir = Reservoir(program.num_ranks, len(program.strata), dtype, first)
    shared = (plan, _mean_reductions_jit(plan), draws.lead, key)
    points = sobol_points(draws, key, dtype)

    def inputs(start, count):
        return () if points is None else (points[start - first :][:count],)

    def keep(start, count, result):
        reservoir.add(np.arange(start, start + count, dtype=np.uint32), *untile(result))
        advance(count * draws.steps // draws.replicas)

    try:
        map_tiles(
            _replica_tile,
            shared,
            draws.replicas,
            keep,
            inputs,
            first=first,
            cost=program.num_ops,
        )
    except KeyboardInterrupt:
        if not reservoir.drawn:
            raise
    return reservoir.replicas()


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
    return leading_axes(plan, _pilot_key(), importance=sampling == "importance")


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
) -> Replicas:
    """Simulates all replicas of each step; the latest end of each pipeline rank is kept, as if it
    were the one replica of a step. Ctrl-C ends it early.
    """
    replicas, ranks = plan.program.num_replicas, plan.program.num_ranks
    strata = plan.program.strata
    first_of = np.zeros(1 + max(s.regime for s in strata), np.int32)
    for i, s in reversed(list(enumerate(strata))):
        first_of[s.regime] = i
    reservoir = Reservoir(ranks, len(strata), plan.mean.dtype, draws.first)
    rest = np.zeros((0, ranks), plan.mean.dtype)

    def keep(start, count, result):
        nonlocal rest
        del start, count
        rest = np.concatenate([rest, untile(result)])
        steps = len(rest) // replicas
        if not steps:
            return
        ready, rest = rest[: steps * replicas], rest[steps * replicas :]
        ends = ready.reshape(steps, replicas, ranks).max(axis=1)
        begin = draws.first + reservoir.drawn
        ids = np.arange(begin, begin + steps, dtype=np.uint32)
        stratum = first_of[np.asarray(_step_regimes(plan.program, jnp.asarray(ids)))]
        reservoir.add(ids, ends, np.max(ends, axis=1), stratum, np.ones(steps, np.float32))
        advance(steps)

    try:
        map_tiles(
            _explicit_tile,
            (plan, key),
            draws.steps * replicas,
            keep,
            first=draws.first * replicas,
            cost=plan.program.num_ops,
        )
    except KeyboardInterrupt:
        if not reservoir.drawn:
            raise
    return reservoir.replicas()


def _explicit_tile(shared, ids):
    plan, key = shared
    regimes = _step_regimes(plan.program, ids // np.uint32(plan.program.num_replicas))
    return replica_ends(plan, ids, key, regimes, poisson_stalls(plan.program, ids, key)).T


def _step_regimes(program: Program, step_ids):
    return strata_of(program, step_ids)[0]


def compose(
    plan: Plan,
    decision: Decision,
    key: KeyData,
    num_steps: int,
    grid: tuple[float, float],
    advance=lambda count: None,
) -> Accumulator:
    """Composes steps of what decides them. Ctrl-C ends it early."""
    accumulator = Accumulator(grid)

    def keep(steps):
        accumulator.add(steps)
        advance(len(steps))

    try:
        run_steps(plan, decision, key, num_steps, keep)
    except KeyboardInterrupt:
        if not accumulator.num_samples:
            raise
    return accumulator


def run_steps(plan: Plan, decision: Decision, key: KeyData, num_steps: int, keep) -> None:
    """Composes steps and gives them to `keep`, a batch at a time, in order."""
    map_tiles(
        step_tile,
        (plan, key),
        num_steps,
        lambda start, count, result: keep(untile(result)),
        decision.inputs,
        first=decision.kept.first,
        cost=plan.program.num_ranks,
    )


def step_tile(shared, ids, ends, regimes):
    """One tile of `compose`."""
    plan, key = shared
    return compose_steps(plan, ends.T, ids, key, regimes)
