"""The laws of classes of ops, looked up in a plan."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..collapse import NODE_SCORES
from ..program import Sinks
from ._op_law import ClassLaw, Collapsed, Single
from ._plan import Plan
from ._structure import Mixed


def class_laws(
    plan: Plan,
    classes: Int[Array, " rows"],
    mixed: Mixed,
    slowest: Float[Array, "rows samples"],
    nodes: Float[Array, " nodes"],
    regimes: Int[Array, " samples"],
    worker_step: Float[Array, "rows samples"] | None = None,
    other_gpus: Float[Array, "rows samples"] | None = None,
) -> ClassLaw:
    """The laws of some classes in each sample, given the factor of the slowest GPU.

    **Arguments:**

    - `classes`: the classes; the result for -1 has no meaning.
    - `mixed`: the kinds of law among them.
    - `slowest`: the factor of the slowest GPU of each.
    - `nodes`: the factors at which moments are known, of the same group of GPUs.
    - `regimes`: the regimes of the network.
    - `worker_step`: a further factor on the compute of each; it is one for communication.
    - `other_gpus`: the score of the other GPUs of each, if several ops share them.

    **Returns:**

    A law of arrays of shape `(rows, samples)`, or `(rows, 1)` if samples do not differ.
    """
    of_plan, tables = plan.structure.classes, plan.tables
    alone = of_plan.blocks.direct[classes] >= 0
    collapsed = single = None
    if mixed.collapsed:
        moments = _moments(plan, classes, alone, slowest, nodes, regimes, worker_step, other_gpus)
        collapsed = Collapsed(moments[0], moments[1], moments[2])
    if mixed.single:
        compute = of_plan.blocks.compute[classes][:, None]
        mean = tables.mean[classes][:, regimes] * jnp.where(compute, slowest, 1)
        mean = mean if worker_step is None else mean * worker_step
        single = _single(plan, classes, mean)
    return ClassLaw(collapsed, single)


def _single(plan: Plan, classes: Int[Array, " rows"], mean: Float[Array, "rows samples"]) -> Single:
    """The laws of classes of one kernel; without a meaning for others."""
    of_plan, tables = plan.structure.classes, plan.tables
    direct = of_plan.blocks.direct[classes]
    kinds = jnp.where(direct >= 0, of_plan.kind[direct], 0)[:, None]
    if tables.residuals is None:
        return Single(mean, tables.sigmas[kinds], None)
    return Single(mean, None, kinds)


def _moments(
    plan: Plan, classes, alone, slowest, nodes, regimes, worker_step, other_gpus
) -> Float[Array, "3 rows samples"]:
    """Mean, standard deviation and skewness, interpolated between nodes; zero if single."""
    reached = slowest[None] >= nodes[1:-1, None, None]
    position = jnp.sum(reached, axis=0, dtype=jnp.int32)
    low, high = nodes[position], nodes[position + 1]
    flat = high <= low
    share = jnp.where(flat, 0, (slowest - low) / jnp.where(flat, 1, high - low))
    moments = plan.tables.moments[:, classes].reshape(3, len(classes), -1)
    index = regimes[None, :] * len(NODE_SCORES) + position
    collapsed = _between(moments, index[None], share[None])
    if plan.tables.shared is not None:
        shared = plan.tables.shared[classes].reshape(len(classes), -1)
        shared = _between(shared, index, share)
        if other_gpus is None:
            # These GPUs run no other op, so their shared part is drawn with the rest.
            collapsed = collapsed.at[1].set(_root_of_squares(collapsed[1], shared))
        else:
            collapsed = collapsed.at[0].add(other_gpus * shared)
    if worker_step is not None:
        assert plan.tables.communication is not None
        communication = plan.tables.communication[:, classes][:, :, regimes]
        collapsed = _with_factor(collapsed, communication, worker_step)
    return jnp.where(alone[None, :, None], 0, collapsed)


def _root_of_squares(x, y):
    """`hypot`, whose derivative is zero at zero."""
    there = y > 0
    return jnp.where(there, jnp.hypot(x, jnp.where(there, y, 1)), x)


def _between(tables: Float[Array, "... nodes"], low: Int[Array, "... samples"], share):
    """Linear interpolation between a node and the next."""
    below = jnp.take_along_axis(tables, low, axis=-1)
    above = jnp.take_along_axis(tables, low + 1, axis=-1)
    return below + share * (above - below)


def _with_factor(
    moments: Float[Array, "3 rows samples"],
    communication: Float[Array, "3 rows samples"],
    factor: Float[Array, "rows samples"],
) -> Float[Array, "3 rows samples"]:
    """The moments of compute and communication together, if all compute takes `factor` times as
    long. Exact, because the cumulants of both add up.
    """
    mean, std, skewness = moments
    mean_apart, std_apart, skewness_apart = communication
    # In units of the standard deviation, for single precision does not hold cubes of seconds.
    varies = std > 0
    part = jnp.where(varies, std_apart / jnp.where(varies, std, 1), 0)
    third_apart = part**3 * skewness_apart
    # A factor of nothing leaves nothing, and a derivative.
    variance = jnp.maximum(part**2 + factor**2 * (1 - part**2), 1e-12)
    third = third_apart + factor**3 * (skewness - third_apart)
    return jnp.stack(
        [
            mean_apart + factor * (mean - mean_apart),
            std * jnp.sqrt(variance),
            third / variance**1.5,
        ]
    )


def reduction_laws(plan: Plan) -> ClassLaw:
    """The law of the gradient reduction of each sink, `(sinks, regimes)`; without a meaning where
    there is none. GPUs make no difference to communication.
    """
    classes = plan.structure.sinks.reduction
    # Of a class that is one kernel the first is zero, of others the second.
    collapsed = Collapsed(*plan.tables.moments[:, classes][..., 0])
    return ClassLaw(collapsed, _single(plan, classes, plan.tables.mean[classes]))


def mean_reductions(plan: Plan) -> Float[Array, "sinks regimes"]:
    """How long after each sink its rank has reduced its gradients, if reductions take their mean
    latencies, in seconds.
    """
    sinks = plan.structure.sinks
    means = plan.tables.moments[0, sinks.reduction, :, 0] + plan.tables.mean[sinks.reduction]
    return until_reduced(sinks, jnp.where((sinks.reduction >= 0)[:, None], means, 0))


def until_reduced(
    sinks: Sinks, reductions: Float[Array, "sinks samples"]
) -> Float[Array, "sinks samples"]:
    """How long after each sink its rank has reduced its gradients, if the sink decides: the rank
    then runs the reduction of the sink and those after it. Earlier reductions have slowed its
    compute.

    **Arguments:**

    - `reductions`: how long each takes.
    """

    def add(after, sink):
        reduction, is_last = sink
        after = reduction + jnp.where(is_last, 0, after)
        return after, after

    none = jnp.zeros_like(reductions[0])
    _, after = lax.scan(add, none, (reductions, sinks.is_last), reverse=True)
    return after + sinks.contention * (after[sinks.first] - after)
