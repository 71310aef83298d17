"""Composes steps from replicas: gradient reduction, the barrier of all ranks, and the tail."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, Int, UInt32

from ..host import on_host
from ..random import KeyData, Stream, fold, normals
from ..replica import (
    SCORE_RANGE,
    ClassLaw,
    Plan,
    class_laws,
    look_up_one,
    table_score,
    until_reduced,
)


def compose_steps(
    plan: Plan,
    ends: Float[Array, "sinks samples"],
    step_ids: UInt32[Array, " samples"],
    key: KeyData,
    regimes: Int[Array, " samples"],
) -> Float[Array, " samples"]:
    """Step times from the ends of each step's decisive replica: `G * (max_s(E_s + RS_s) + tail)`,
    where `G` is the factor of the step, `RS_s` are the gradient reductions that the pipeline rank
    still has to do from sink `s` on, and the tail follows the barrier of all ranks.

    **Arguments:**

    - `ends`: the ends of the sinks, in seconds.
    - `step_ids`: the ids for the draws of the factor, the reductions and the tail.
    - `regimes`: the regimes of the network, the same as those of the replicas.

    **Returns:**

    Step times in seconds. Differentiable in `ends` and the plan.

    !!! note

        The slowest GPU of the tail is drawn independently, although it is one of the replicas'
        GPUs. The tail is too short for this to matter.
    """
    barrier, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    return _factor(plan, z["step"]) * (barrier + _seconds(plan, tail, z["tail"]))


class Over(eqx.Module):
    """Replaces the time of a step by the probability that it takes longer than a threshold, given
    all of its draws except one.

    **Attributes:**

    - `threshold`: in seconds, for all steps or for each.
    - `last`: the draw that is not given: that of the `"step"` factor or of the `"tail"`. It must
        vary.
    """

    threshold: Float[Array, "*steps"]
    last: str = eqx.field(static=True)


def steps_of(
    plan: Plan, ends: Any, step_ids: Any, key: Any, regimes: Any, over: Over | None
) -> Float[Array, " steps"]:
    """The result of `compose_steps` or, with `over`, a probability for each step: conditional Monte
    Carlo (Fu, Hong and Hu, "Conditional Monte Carlo estimation of quantile sensitivities", 2009).
    The probability is the conditional mean of an indicator function but, unlike this, has a
    derivative.
    """
    if over is None:
        return compose_steps(plan, ends, step_ids, key, regimes)
    barrier, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    if over.last == "step":
        assert plan.tables.step is not None
        whole = barrier + _seconds(plan, tail, z["tail"])
        # Samples that only fill up a tile end at zero.
        whole = jnp.where(whole > 0, whole, over.threshold)
        score = table_score(plan.tables.step, over.threshold / whole)
    else:
        assert tail is not None
        left = over.threshold / _factor(plan, z["step"]) - barrier
        score = tail.score(left[None, :], plan.tables.residuals)[0]
    # Beyond the table nothing is known but that it hardly ever happens.
    return jnp.where(score < SCORE_RANGE, ndtr(-score), 0)


def last_spreads(plan: Plan, step_time: float) -> dict[str, float]:
    """How far the last draws (step factor and tail) spread a step of a given length, in seconds."""
    spreads = on_host(_last_spreads, plan, np.asarray(step_time, plan.dtype))
    there = {"step": plan.tables.step is not None, "tail": int(plan.structure.tail) >= 0}
    return {name: float(spreads[name]) for name, is_there in there.items() if is_there}


def _last_spreads(plan: Plan, step_time: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    one = jnp.ones((1, 1), plan.dtype)
    ends = {}
    if plan.tables.step is not None:
        ends["step"] = [step_time * look_up_one(plan.tables.step, z) for z in (one, -one)]
    tail = _tail(plan, one, jnp.zeros((1,), jnp.int32))
    if tail is not None:
        ends["tail"] = [tail.latency(z, plan.tables.residuals) for z in (one, -one)]
    return {name: ((high - low) / 2)[0, 0] for name, (high, low) in ends.items()}


def _tail(plan: Plan, slowest: Float[Array, "1 samples"], regimes) -> ClassLaw | None:
    """The law of the tail, after all ranks have met."""
    structure = plan.structure
    if not (structure.last.collapsed or structure.last.single):
        return None
    classes = structure.tail[None]
    return class_laws(plan, classes, structure.last, slowest, plan.tables.tail_nodes, regimes)


def _before_last(plan: Plan, ends: Any, step_ids: Any, key: Any, regimes: Any):
    """When all ranks have met, the scores of the step factor and the tail, and the tail's law."""
    z, last = _scores(plan, step_ids, key)
    finished = _finished(plan, ends, z, regimes)
    slowest = jnp.ones((1, ends.shape[1]), ends.dtype)
    if plan.tables.tail_slowest is not None:
        slowest = look_up_one(plan.tables.tail_slowest, last["slowest"])[None, :]
    return jnp.max(finished, axis=0), last, _tail(plan, slowest, regimes)


def _scores(plan: Plan, step_ids, key):
    """Scores of the reductions, `(sinks, samples)`, and of the last draws, `(samples,)` each."""
    sinks, number = len(plan.structure.sinks.first), plan.structure.sinks.number
    # Counted by the sinks that there are, so that numbers do not depend on padding.
    counter = jnp.arange(sinks, dtype=jnp.uint32)
    counter = jnp.concatenate([counter, number + jnp.arange(3, dtype=jnp.uint32)])[:, None]
    z = normals(fold(key, Stream.STEPS), step_ids, counter, plan.dtype)
    return z[:sinks], {"step": z[sinks], "slowest": z[sinks + 1], "tail": z[sinks + 2]}


def _finished(plan: Plan, ends, z, regimes) -> Float[Array, "sinks samples"]:
    """When the rank of each sink has reduced its gradients, if this sink decides."""
    mixed = plan.structure.reductions
    if not (mixed.collapsed or mixed.single):
        return ends
    sinks = plan.structure.sinks
    there = (sinks.reduction >= 0)[:, None]
    return ends + until_reduced(sinks, jnp.where(there, _reductions(plan, z, regimes), 0))


def barriers(
    plan: Plan, ends: Any, step_ids: Any, key: Any, regimes: Any
) -> tuple[Float[Array, "sinks samples"], Float[Array, " samples"]]:
    """When the rank of each sink has reduced its gradients, if this sink decides, and the factor of
    the step. See `compose_steps`.
    """
    z, last = _scores(plan, step_ids, key)
    return _finished(plan, ends, z, regimes), _factor(plan, last["step"])


def _factor(plan: Plan, score: Float[Array, " samples"]) -> Float[Array, " samples"]:
    """The factor of each step."""
    step = plan.tables.step
    return jnp.ones_like(score) if step is None else look_up_one(step, score)


def _seconds(
    plan: Plan, tail: ClassLaw | None, score: Float[Array, " samples"]
) -> Float[Array, " samples"]:
    """The tail of each step, before the factor of the step."""
    if tail is None:
        return jnp.zeros_like(score)
    return tail.latency(score[None, :], plan.tables.residuals)[0]


def last_draws(plan: Plan, step_ids: Any, key: Any, regimes: Any) -> Float[Array, "2 samples"]:
    """The factor of each step and, with it, the step's tail, in seconds. See `compose_steps`."""
    sinks = len(plan.structure.sinks.first)
    ends = jnp.zeros((sinks, step_ids.shape[0]), plan.dtype)
    _, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    factor = _factor(plan, z["step"])
    return jnp.stack([factor, factor * _seconds(plan, tail, z["tail"])])


def _reductions(
    plan: Plan, z: Float[Array, "sinks samples"], regimes: Int[Array, " samples"]
) -> Float[Array, "sinks samples"]:
    structure, classes = plan.structure, plan.structure.sinks.reduction
    number = plan.tables.mean.shape[1]
    ones = jnp.ones((z.shape[0], number), z.dtype)
    of_regimes = jnp.arange(number, dtype=jnp.int32)
    nodes = plan.tables.nodes
    laws = class_laws(plan, classes, structure.reductions, ones, nodes, of_regimes)

    def one(row):
        law, score = row
        mine = jax.tree.map(lambda x: x if x.shape[0] == 1 else x[regimes], law)
        return mine.latency(score, plan.tables.residuals)

    # A loop is compiled alike whatever surrounds it: the bits of a step must not depend on the
    # number of devices.
    return lax.map(one, (laws, z))
