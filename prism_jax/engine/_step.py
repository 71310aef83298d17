"""From replicas to a step: reduction of gradients, the barrier of all ranks, and the tail."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from ._plan import Plan, latency, look_up_one, row_laws
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
    program = plan.program
    dtype = ends.dtype
    number = program.num_ranks
    z = normals(fold(key, STEPS), step_ids, counters(number + 3), dtype)
    one = jnp.ones((1, ends.shape[1]), dtype)

    finished = ends
    if np.any(program.reduce_scatter.value >= 0):
        reduction = _reductions(plan, z[:number], regimes)
        exposed = jnp.asarray(program.reduce_scatter.value >= 0)[:, None]
        finished = ends + jnp.where(exposed, reduction, 0)
    step = jnp.max(finished, axis=0)
    if plan.step is not None:
        step = step * look_up_one(plan.step, z[number])
    if program.tail >= 0:
        slowest = one
        if plan.tail_slowest is not None:
            slowest = look_up_one(plan.tail_slowest, z[number + 1])[None, :]
        laws = row_laws(plan, np.array([program.tail]), slowest, plan.tail_nodes, regimes)
        step = step + latency(laws, plan.residuals, z[number + 2][None, :])[0]
    return step


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
