"""`simulate`: the host loop over tiles."""

import time
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from ..program import Program, check_variability, stall_probabilities, stall_rates
from ._accumulate import Accumulator, grid_of
from ._decide import Decision, decide
from ._law import Law
from ._plan import Plan, make_plan
from ._progress import progress_bar
from ._random import KeyData, key_data
from ._replica import poisson_stalls, replica_ends, strata_of, stratum_of
from ._replicas import Replicas, add_replicas, no_replicas
from ._step import compose_steps, mean_reductions
from ._tiles import map_tiles, untile


# The pilot that sets the grid always uses this key, so that results of other keys can be merged.
_PILOT_SEED = 0
_PILOT_SAMPLES = 4096

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
    progress: bool = False,
) -> Law:
    """Simulates steps and returns the law of the step time.

    Work runs in tiles of fixed size on all of JAX's devices. One key gives the same bits whatever
    the devices, and the first replica samples are the same for any `num_samples`.

    Memory does not grow with `num_samples`: of the replica samples, the first 2^18 and the slowest
    2^17 are kept. More samples than that sharpen the tail (and any figure of many replicas, whose
    steps are decided in the tail) but not the body of the law.

    **Arguments:**

    - `program`: what to simulate.
    - `num_samples`: how many steps (at least 1).
    - `key`: a `jax.random` key.
    - `replicas`: how the slowest of the data-parallel replicas is found. `"vector"` picks it from
        samples of one replica; `"exact"` does so for each pipeline rank apart (slower, a check);
        `"explicit"` simulates every replica of every step.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Law`][]. Ctrl-C ends the run early: the law is then of the steps so far, and says so.

    **Raises:**

    `ValueError` for a bad `num_samples` or `replicas`, or a program whose latencies are not finite.
    """
    check_program(program)
    check_num_samples(num_samples)
    if replicas not in ("vector", "exact", "explicit"):
        raise ValueError(f"`replicas={replicas!r}` must be 'vector', 'exact' or 'explicit'.")
    started = time.perf_counter()
    plan = make_plan_jit(program)
    check_plan(plan)
    grid = _pilot_grid(plan)
    compiled = time.perf_counter()

    explicit = replicas == "explicit"
    work = num_samples * (program.num_replicas if explicit else 1)
    words = key_data(key)
    with progress_bar(work + num_samples, progress) as advance:
        draw = explicit_replicas if explicit else draw_replicas
        kept, drawn = draw(plan, words, num_samples, advance)
        rule = "exact" if replicas == "exact" else "vector"
        decision = decide(plan.program, kept, words, drawn, explicit=explicit, rule=rule)
        accumulator = compose(plan, decision, words, drawn, grid, advance)
    return accumulator.law(
        decision,
        requested=num_samples,
        compile_s=compiled - started,
        run_s=time.perf_counter() - compiled,
    )


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


def _pilot_grid(plan: Plan) -> tuple[float, float]:
    words = key_data(jax.random.key(_PILOT_SEED))
    kept, _ = draw_replicas(plan, words, _PILOT_SAMPLES)
    decision = decide(plan.program, kept, words, _PILOT_SAMPLES)
    steps = [untile(result) for _, _, result in _steps(plan, decision, words, _PILOT_SAMPLES)]
    return grid_of(np.concatenate(steps))


def draw_replicas(
    plan: Plan, key: KeyData, num_samples: int, advance=lambda count: None
) -> tuple[Replicas, int]:
    """Draws samples of one replica. Ctrl-C ends it early.

    **Returns:**

    What is kept of them, and how many were drawn.
    """
    reductions = np.asarray(_mean_reductions_jit(plan))
    regime_of = np.array([s.regime for s in plan.program.strata])
    kept = no_replicas(plan.program.num_ranks, len(regime_of), plan.mean.dtype)
    drawn = 0
    try:
        for first, count, result in map_tiles(replica_tile, (plan, key), num_samples):
            ends, stratum = untile(result)
            score = np.max(ends + reductions[:, regime_of[stratum]], axis=0)
            ids = np.arange(first, first + count, dtype=np.uint32)
            kept = add_replicas(kept, ids, ends, score, stratum)
            drawn += count
            advance(count)
    except KeyboardInterrupt:
        if not drawn:
            raise
    return kept, drawn


def replica_tile(shared, ids):
    """One tile of `draw_replicas`."""
    plan, key = shared
    regimes, stalls = strata_of(plan.program, ids)
    return replica_ends(plan, ids, key, regimes, stalls), stratum_of(plan.program, ids)


def explicit_replicas(
    plan: Plan, key: KeyData, num_steps: int, advance=lambda count: None
) -> tuple[Replicas, int]:
    """Simulates all replicas of each step; the latest end of each pipeline rank is kept, as if it
    were the one replica of a step. Ctrl-C ends it early.
    """
    replicas = plan.program.num_replicas
    strata = plan.program.strata
    first_of = {s.regime: i for i, s in reversed(list(enumerate(strata)))}
    kept = no_replicas(plan.program.num_ranks, len(strata), plan.mean.dtype)
    rest = np.zeros((plan.program.num_ranks, 0), plan.mean.dtype)
    done = 0
    try:
        for _, count, result in map_tiles(_explicit_tile, (plan, key), num_steps * replicas):
            rest = np.concatenate([rest, untile(result)], axis=1)
            steps = rest.shape[1] // replicas
            ready, rest = rest[:, : steps * replicas], rest[:, steps * replicas :]
            ends = ready.reshape(len(ready), steps, replicas).max(axis=2)
            ids = np.arange(done, done + steps, dtype=np.uint32)
            regimes = np.asarray(_step_regimes(plan.program, jnp.asarray(ids)))
            stratum = np.array([first_of[int(g)] for g in regimes], np.int32)
            kept = add_replicas(kept, ids, ends, np.max(ends, axis=0, initial=0), stratum)
            done += steps
            advance(count)
    except KeyboardInterrupt:
        if not done:
            raise
    return kept, done


def _explicit_tile(shared, ids):
    plan, key = shared
    regimes = _step_regimes(plan.program, ids // np.uint32(plan.program.num_replicas))
    return replica_ends(plan, ids, key, regimes, poisson_stalls(plan.program, ids, key))


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
    try:
        for _, count, result in _steps(plan, decision, key, num_steps):
            accumulator.add(untile(result))
            advance(count)
    except KeyboardInterrupt:
        if not accumulator.num_samples:
            raise
    return accumulator


def _steps(plan: Plan, decision: Decision, key: KeyData, num_steps: int):
    return map_tiles(step_tile, (plan, key), num_steps, decision.inputs)


def step_tile(shared, ids, ends, regimes):
    """One tile of `compose`."""
    plan, key = shared
    return compose_steps(plan, ends, ids, key, regimes)
