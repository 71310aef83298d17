"""Composes steps from replicas, of which one decides each: gradient reduction, the barrier of all
ranks, and the tail.

The error of a figure is how it moves with the weights of samples. If a sample weighs a little more
than by its law, the mean of any function of the slowest of R replicas moves by the mean, over steps
that this sample decides, of the function at the slowest minus that at the slowest of the others.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..host import on_host
from ..op_law import SCORE_RANGE, ClassLaw, Table, class_laws, look_up_one, table_score
from ..random import KeyData, Stream, fold, normals
from ..replica import Plan, reduction_laws, until_reduced
from ._pool import Pool, picked


# So many tiles of steps make a batch for a device.
STEP_TILES = 8


class StepParts(eqx.Module):
    """What steps consist of: each takes `factor * (barrier + tail)`, in seconds.

    **Attributes:**

    - `barrier`: when all pipeline ranks have reduced their gradients.
    - `factor`: of the step.
    - `tail`: what follows the barrier.
    - `tail_law`: the law of the tail, given its slowest GPU; `None` if there is none.
    """

    barrier: Float[Array, " steps"]
    factor: Float[Array, " steps"]
    tail: Float[Array, " steps"]
    tail_law: ClassLaw | None

    def times(self) -> Float[Array, " steps"]:
        """Step times in seconds."""
        return self.factor * (self.barrier + self.tail)


def step_parts(
    plan: Plan,
    ends: Float[Array, "sinks steps"],
    step_ids: UInt32[Array, " steps"],
    key: KeyData,
    regimes: Int[Array, " steps"],
) -> tuple[Float[Array, "sinks steps"], StepParts]:
    """Composes steps from the ends of each step's decisive replica: `G * (max_s(E_s + RS_s) +
    tail)`, where `G` is the factor of the step, `RS_s` are the gradient reductions that the
    pipeline rank still has to do from sink `s` on, and the tail follows the barrier of all ranks.

    **Arguments:**

    - `ends`: the ends of the sinks, in seconds.
    - `step_ids`: the ids for the draws of the factor, the reductions and the tail.
    - `regimes`: the regimes of the network, the same as those of the replicas.

    **Returns:**

    When the rank of each sink has reduced its gradients, if the sink decides, and the parts of the
    steps. Differentiable in `ends` and the plan.

    !!! note

        The slowest GPU of the tail is drawn independently, although it is one of the replicas'
        GPUs. Where one group of GPUs runs all of the step, and they alone vary, the spread of steps
        lacks the share of the tail in their compute, such as 5 %.
    """
    sinks, number = plan.structure.sinks, plan.structure.sinks.number
    room = len(sinks.first)
    # Counted by the sinks that there are, so that numbers do not depend on padding.
    counter = jnp.arange(room, dtype=jnp.uint32)
    counter = jnp.concatenate([counter, number + jnp.arange(3, dtype=jnp.uint32)])[:, None]
    z = normals(fold(key, Stream.STEPS), step_ids, counter, plan.dtype)
    ready = ends
    if plan.structure.reduced:
        is_reduced = (sinks.reduction >= 0)[:, None]
        reductions = jnp.where(is_reduced, _reductions(plan, z[:room], regimes), 0)
        # The same bits wherever they are read: who decides is found by equality with the latest.
        ready = lax.optimization_barrier(ends + until_reduced(sinks, reductions))
    factor, tail = jnp.ones_like(z[0]), jnp.zeros_like(z[0])
    if plan.tables.step is not None:
        factor = look_up_one(plan.tables.step, z[room])
    slowest = jnp.ones((1, len(z[0])), z.dtype)
    if plan.tables.tail_slowest is not None:
        slowest = look_up_one(plan.tables.tail_slowest, z[room + 1])[None, :]
    law = _tail(plan, slowest, regimes)
    if law is not None:
        tail = law.latency(z[room + 2][None, :], plan.tables.residuals)[0]
        law = jax.tree.map(lambda x: jnp.broadcast_to(x[0], tail.shape), law)
    return ready, StepParts(jnp.max(ready, axis=0), factor, tail, law)


def _tail(plan: Plan, slowest: Float[Array, "1 samples"], regimes) -> ClassLaw | None:
    """The law of the tail, after all ranks have met."""
    structure = plan.structure
    if not (structure.last.collapsed or structure.last.single):
        return None
    tail: Any = structure.tail
    of_plan = structure.classes, plan.tables, tail[None], structure.last
    return class_laws(*of_plan, slowest, plan.tables.tail_nodes, regimes)


def _reductions(
    plan: Plan, z: Float[Array, "sinks steps"], regimes: Int[Array, " steps"]
) -> Float[Array, "sinks steps"]:
    """How long the reduction of each sink takes."""

    def reduction_of(row):
        law, score = row
        law_of_steps = jax.tree.map(ft.partial(_of_regimes, regimes), law)
        return law_of_steps.latency(score, plan.tables.residuals)

    # A loop is compiled alike whatever surrounds it: the bits of a step must not depend on the
    # number of devices.
    return lax.map(reduction_of, (reduction_laws(plan), z))


def _of_regimes(regimes: Int[Array, " steps"], x: Array) -> Array:
    """`x[regimes]`, without a loop over steps."""
    chosen = x[:1]
    for g in range(1, len(x)):
        chosen = jnp.where(regimes == g, x[g], chosen)
    return chosen


class Decided(eqx.Module):
    """Steps of a pool.

    **Attributes:**

    - `times`: in seconds.
    - `without`: the same without the replica that decided a step; `nan` if it looked at no other.
    - `decider`: the position in the pool of the sample that decided it; of several pools, as if
        they stood one after the other.
    - `sink`: the sink that decided it; of equals the first.
    - `last`: whether the last of the replicas that it looked at in a pool decided it, though it has
        more of this pool: then more should be.
    """

    times: Float[Array, " steps"]
    without: Float[Array, " steps"]
    decider: Int[Array, " steps"]
    sink: Int[Array, " steps"]
    last: Bool[Array, " steps"]


class Composed(eqx.Module):
    """What decided steps consist of.

    **Attributes:**

    - `parts`: of each.
    - `without`: its barrier without the replica that decided it; `nan` if it looked at no other.
    - `regime`: of the network.
    """

    parts: StepParts
    without: Float[Array, " steps"]
    regime: Int[Array, " steps"]


def decided_steps(
    plan: Plan,
    pools: Sequence[Pool],
    step_ids: UInt32[Array, " steps"],
    key: KeyData,
    *ranks: Int[Array, " steps"],
) -> tuple[Decided, Composed]:
    """The steps of a pool, by the ids of their own draws; or of several, whose replicas differ.

    **Arguments:**

    - `ranks`: for each pool but the first, the rank of each step among those of the pool. In the
        first they are in order.
    """
    places = (step_ids - pools[0].first_step).astype(jnp.int32), *ranks
    samples, regimes = picked(pools[0], places[0], step_ids, key, plan.dtype)
    ends, before = pools[0].ends[samples], 0
    for number in range(1, len(pools)):
        before += len(pools[number - 1].ends)
        pool_key = fold(key, Stream.UNLIKE, number)
        unlike, _ = picked(pools[number], places[number], step_ids, pool_key, plan.dtype)
        ends = jnp.concatenate([ends, pools[number].ends[unlike]])
        samples = jnp.concatenate([samples, before + unlike])
    by_step, ends = ends, jnp.moveaxis(ends, 2, 1)
    latest = jnp.max(ends, axis=0)  # Of `(looks, sinks, steps)`.
    room, sinks = len(plan.structure.sinks.first), len(latest)
    padded = jnp.pad(latest, ((0, room - sinks), (0, 0)))
    ready, parts = step_parts(plan, padded, step_ids, key, regimes)
    ready = ready[:sinks]
    # The first of equals, by a plain reduction: XLA's `argmax` over many is slower on a CPU.
    number = jnp.arange(sinks, dtype=jnp.int32)[:, None]
    sink = jnp.min(jnp.where(ready == parts.barrier[None], number, sinks - 1), axis=0)
    look = jnp.argmax(jnp.take_along_axis(by_step, sink[None, :, None], axis=2)[..., 0], axis=0)
    decides = look[None] == jnp.arange(len(samples), dtype=look.dtype)[:, None]
    decider = jnp.sum(jnp.where(decides, samples, 0), axis=0, dtype=samples.dtype)
    barrier = jnp.full_like(parts.barrier, jnp.nan)
    if len(samples) > 1:
        of_looks = jnp.max(ends + (ready - latest)[None], axis=1)
        barrier = jnp.max(jnp.where(decides, -jnp.inf, of_looks), axis=0)
    without = parts.factor * (barrier + parts.tail)
    is_last = [jnp.append(jnp.zeros(len(pool.later), bool), ~pool.all_looked_at) for pool in pools]
    last = jnp.concatenate(is_last)[look]
    steps = Decided(parts.times(), without, decider, sink, last)
    return steps, Composed(parts, barrier, regimes)


class ConditionalExceedance(eqx.Module):
    """Replaces the time of a step by the probability that it takes longer than a threshold, given
    all of its draws except one.

    **Attributes:**

    - `threshold`: in seconds.
    - `last`: the draw that is not given: that of the `"step"` factor or of the `"tail"`. It must
        vary.
    """

    threshold: Float[Array, ""] | Float[np.ndarray, ""]
    last: str = eqx.field(static=True)


def times_or_chances(
    step: Table | None,
    residuals: Float[Array, "kinds scores"] | None,
    parts: StepParts,
    exceedance: ConditionalExceedance | None,
) -> Float[Array, " steps"]:
    """The times of steps or, with `exceedance`, a probability for each: conditional Monte Carlo
    (Fu, Hong and Hu, "Conditional Monte Carlo estimation of quantile sensitivities", 2009). The
    probability is the conditional mean of an indicator function but, unlike this, has a derivative.

    **Arguments:**

    - `step`, `residuals`: the tables of the last draws: of the factor of the step, and of laws
        without a closed form; `None` for none.
    """
    if exceedance is None:
        return parts.times()
    threshold = jnp.asarray(exceedance.threshold)
    if exceedance.last == "step":
        assert step is not None
        totals = parts.barrier + parts.tail
        # Steps may take no time.
        totals = jnp.where(totals > 0, totals, threshold)
        score = table_score(step, threshold / totals)
    else:
        assert parts.tail_law is not None
        remaining = threshold / parts.factor - parts.barrier
        score = parts.tail_law.score(remaining, residuals)
    # Beyond the table nothing is known but that it hardly ever happens.
    return jnp.where(score < SCORE_RANGE, ndtr(-score), 0)


def last_spreads(plan: Plan, step_time: float) -> dict[str, float]:
    """How far the last draws (step factor and tail) spread a step of a given length, in seconds."""
    spreads = on_host(_last_spreads, plan, np.asarray(step_time, plan.dtype))
    has_draws = {"step": plan.tables.step is not None, "tail": int(plan.structure.tail) >= 0}
    return {name: float(spreads[name]) for name, is_there in has_draws.items() if is_there}


def _last_spreads(plan: Plan, step_time: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    score = jnp.ones((1, 1), plan.dtype)
    ends = {}
    if plan.tables.step is not None:
        ends["step"] = [step_time * look_up_one(plan.tables.step, z) for z in (score, -score)]
    tail = _tail(plan, score, jnp.zeros((1,), jnp.int32))
    if tail is not None:
        ends["tail"] = [tail.latency(z, plan.tables.residuals) for z in (score, -score)]
    return {name: ((high - low) / 2)[0, 0] for name, (high, low) in ends.items()}
