"""From replicas to a step: reduction of gradients, the barrier of all ranks, and the tail."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, Int, UInt32

from ._plan import SCORE_RANGE, Plan, latency, latency_score, look_up_one, row_laws, table_score
from ._random import KeyData, counters, fold, normals


# The stream of random numbers of a step, apart from those of its replicas.
STEPS = 100


def compose_steps(
    plan: Plan,
    ends: Float[Array, "ranks samples"],
    step_ids: UInt32[Array, " samples"],
    key: KeyData,
    regimes: Int[Array, " samples"],
) -> Float[Array, " samples"]:
    """Step times from the ends of each step's decisive replica:
    `G * max_s(E_s + RS_s) + tail`, with the factor `G` of the step, the exposed reduction of
    gradients `RS_s` of pipeline rank `s`, and a tail after the barrier of all ranks.

    **Arguments:**

    - `ends`: the end of each pipeline rank, in seconds.
    - `step_ids`: which draws of the factor, the reductions and the tail to use.
    - `regimes`: of the network, the same as of the replica.

    **Returns:**

    Step times in seconds. Differentiable in `ends` and the plan.

    !!! note

        The slowest GPU of the tail is drawn by itself, although it is one of those that the
        replicas have; the tail is too short for that to show.
    """
    barrier, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    if plan.step is not None:
        barrier = barrier * look_up_one(plan.step, z["step"])
    if tail is not None:
        barrier = barrier + latency(tail, plan.residuals, z["tail"][None, :])[0]
    return barrier


class Over(eqx.Module):
    """To go by the probability that a step takes longer than a threshold, given all of its draws
    but one, in place of its time.

    **Attributes:**

    - `threshold`: in seconds.
    - `last`: the draw left open: that of the `"step"` factor or of the `"tail"`. It must vary.
    """

    threshold: Float[Array, ""]
    last: str = eqx.field(static=True)


def steps_of(plan: Plan, ends, step_ids, key, regimes, over: Over | None) -> Float[Array, " steps"]:
    """What `compose_steps` gives, or with `over` a probability each: conditional Monte Carlo (Fu,
    Hong and Hu, "Conditional Monte Carlo estimation of quantile sensitivities", 2009). Unlike the
    indicator that it is the mean of, it has a derivative.
    """
    if over is None:
        return compose_steps(plan, ends, step_ids, key, regimes)
    barrier, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    if over.last == "step":
        assert plan.step is not None
        left = jnp.broadcast_to(over.threshold, barrier.shape)
        if tail is not None:
            left = left - latency(tail, plan.residuals, z["tail"][None, :])[0]
        # Samples that only fill up a tile end at zero.
        score = table_score(plan.step, left / jnp.where(barrier > 0, barrier, over.threshold))
    else:
        if plan.step is not None:
            barrier = barrier * look_up_one(plan.step, z["step"])
        assert tail is not None
        score = latency_score(tail, plan.residuals, (over.threshold - barrier)[None, :])[0]
    # Beyond the table nothing is known but that it hardly ever happens.
    return jnp.where(score < SCORE_RANGE, ndtr(-score), 0)


def last_spreads(plan: Plan, step_time: float) -> dict[str, Float[Array, ""]]:
    """How far the draws that come last spread a step of a given length, in seconds."""
    one = jnp.ones((1, 1), plan.mean.dtype)
    ends = {}
    if plan.step is not None:
        ends["step"] = [step_time * look_up_one(plan.step, z) for z in (one, -one)]
    if plan.program.tail >= 0:
        calm = jnp.zeros((1,), jnp.int32)
        law = row_laws(plan, np.array([plan.program.tail]), one, plan.tail_nodes, calm)
        ends["tail"] = [latency(law, plan.residuals, z) for z in (one, -one)]
    return {name: ((high - low) / 2)[0, 0] for name, (high, low) in ends.items()}


def _before_last(plan: Plan, ends, step_ids, key, regimes):
    """When all ranks have met, the scores of the step factor and the tail, and the tail's law."""
    program = plan.program
    dtype = ends.dtype
    number = program.num_ranks
    z = normals(fold(key, STEPS), step_ids, counters(number + 3), dtype)
    finished = _finished(plan, ends, z[:number], regimes)
    tail = None
    if program.tail >= 0:
        slowest = jnp.ones((1, ends.shape[1]), dtype)
        if plan.tail_slowest is not None:
            slowest = look_up_one(plan.tail_slowest, z[number + 1])[None, :]
        tail = row_laws(plan, np.array([program.tail]), slowest, plan.tail_nodes, regimes)
    return jnp.max(finished, axis=0), {"step": z[number], "tail": z[number + 2]}, tail


def _finished(plan: Plan, ends, z, regimes) -> Float[Array, "ranks samples"]:
    """When each pipeline rank has reduced its gradients."""
    classes = plan.program.reduce_scatter.value
    if not np.any(classes >= 0):
        return ends
    exposed = jnp.asarray(classes >= 0)[:, None]
    return ends + jnp.where(exposed, _reductions(plan, z, regimes), 0)


def barriers(plan: Plan, ends, step_ids, key, regimes):
    """When each pipeline rank has reduced its gradients `(ranks, samples)`, and the factor of the
    step `(samples,)`. See `compose_steps`.
    """
    number = plan.program.num_ranks
    z = normals(fold(key, STEPS), step_ids, counters(number + 3), ends.dtype)
    factor = jnp.ones_like(z[0]) if plan.step is None else look_up_one(plan.step, z[number])
    return _finished(plan, ends, z[:number], regimes), factor


def last_draws(plan: Plan, step_ids, key, regimes) -> Float[Array, "2 samples"]:
    """The factor of each step and its tail, in seconds. See `compose_steps`."""
    ends = jnp.zeros((plan.program.num_ranks, step_ids.shape[0]), plan.mean.dtype)
    _, z, tail = _before_last(plan, ends, step_ids, key, regimes)
    factor = jnp.ones_like(ends[0]) if plan.step is None else look_up_one(plan.step, z["step"])
    if tail is None:
        return jnp.stack([factor, jnp.zeros_like(factor)])
    return jnp.stack([factor, latency(tail, plan.residuals, z["tail"][None, :])[0]])


def _reductions(
    plan: Plan, z: Float[Array, "ranks samples"], regimes: Int[Array, " samples"]
) -> Float[Array, "ranks samples"]:
    number = plan.mean.shape[1]
    ones = jnp.ones((z.shape[0], number), z.dtype)
    classes = plan.program.reduce_scatter.value
    laws = row_laws(plan, classes, ones, plan.nodes, jnp.arange(number, dtype=jnp.int32))

    def one(row):
        law, score = row
        mine = {name: x if x.shape[0] == 1 else x[regimes] for name, x in law.items()}
        return latency(mine, plan.residuals, score)

    # A loop is compiled alike whatever surrounds it: the bits of a step must not depend on the
    # number of devices.
    return lax.map(one, (laws, z))


def mean_reductions(plan: Plan) -> Float[Array, "ranks regimes"]:
    """The mean of each pipeline rank's exposed reduction of gradients, in seconds."""
    classes = plan.program.reduce_scatter.value
    means = plan.moments[0, classes, :, 0] + plan.mean[classes]
    return jnp.where(jnp.asarray(classes >= 0)[:, None], means, 0)
