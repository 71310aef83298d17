"""What a program's parameters amount to, computed once before any sample is drawn."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ..latency import AbstractLatency, Constant, LogNormal, cube_normal, cube_normal_score
from ..program import (
    NODE_SCORES,
    Program,
    class_moments,
    gpu_factors,
    segment_skewness,
    stall_rates,
)
from ._elementary import exp


# Quantile tables are uniform in the standard-normal score, which keeps their error small in tails.
SCORE_RANGE = 6.0
NUM_SCORES = 2049

Table = Float[Array, " scores"]


class Plan(eqx.Module):
    """Tables from which latencies are looked up. Differentiable in the program's parameters.

    **Attributes:**

    - `program`: of which only the static part is read.
    - `moments`: mean, standard deviation and skewness of each class, by regime of the network and
        factor of the slowest GPU, in seconds.
    - `skewness`: of the segments that members run by themselves.
    - `nodes`, `tail_nodes`: those factors, for a rank's group and for all GPUs together.
    - `mean`: of each class that is one kernel with a law of its own, by regime, in seconds.
    - `sigmas`: that law's shape, for each kind of kernel, where it is log-normal or constant.
    - `residuals`: tables of that shape where it is neither; `None` where no op needs one.
    - `slowest`, `tail_slowest`, `microbatch`, `step`: tables of the shared factors.
    - `stall_shares`: the cumulative shares of the ops that may stall; `stall_sizes` by kind.
    """

    program: Program
    moments: Float[Array, "3 classes regimes nodes"]
    skewness: Float[Array, " segments"]
    nodes: Float[Array, " nodes"]
    tail_nodes: Float[Array, " nodes"]
    mean: Float[Array, "classes regimes"]
    sigmas: Float[Array, " kinds"]
    residuals: Float[Array, "kinds scores"] | None
    slowest: Table | None
    tail_slowest: Table | None
    microbatch: Table | None
    step: Table | None
    stall_shares: Float[Array, " stalls"] | None
    stall_sizes: Float[Array, "stall_kinds scores"] | None


def make_plan(program: Program) -> Plan:
    """Computes the tables. Pure, jittable and differentiable."""
    table, variability = program.latencies, program.variability
    dtype = table.mean.dtype
    cumulants = table.cumulants(variability.residual)
    if variability.network is None:
        network = jnp.ones((len(table.mean), 1), dtype)
    else:
        factors = variability.network.factors().astype(dtype)
        exposed = jnp.asarray(table.on_network.value)[:, None]
        network = jnp.where(exposed, factors[None, :], jnp.ones((1, 1), dtype))
    direct = program.blocks.direct.value
    chosen = jnp.asarray(direct >= 0)[:, None]
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    counts = (program.group_size, program.world_size)
    (ranks, everyone), slowest = gpu_factors(variability.rank, counts, scores)
    groups = {program.world_size: everyone, program.group_size: ranks}
    stalls = [variability.stalls[kind].size for kind in sorted(variability.stalls)]
    has_stalls = len(program.stall_ops.value) > 0
    return Plan(
        program=program,
        moments=class_moments(program.blocks, cumulants, network, groups),
        skewness=segment_skewness(program.blocks, cumulants),
        nodes=ranks.slowest,
        tail_nodes=everyone.slowest,
        mean=jnp.where(chosen, table.mean[direct][:, None] * network[direct], jnp.zeros((), dtype)),
        sigmas=jnp.stack([_sigma(variability.residual[kind], dtype) for kind in table.kinds]),
        residuals=_residuals(program),
        slowest=None if variability.rank is None else slowest[0],
        tail_slowest=None if variability.rank is None else slowest[1],
        microbatch=_optional(variability.microbatch, dtype),
        step=_optional(variability.step, dtype),
        stall_shares=_shares(stall_rates(program)).astype(dtype) if has_stalls else None,
        stall_sizes=jnp.stack([_tabulate(law, dtype) for law in stalls]) if has_stalls else None,
    )


def _sigma(law: AbstractLatency, dtype) -> Float[Array, ""]:
    """The parameter of a log-normal law, zero for others."""
    return jnp.asarray(law.sigma if isinstance(law, LogNormal) else 0.0, dtype)


def _residuals(program: Program) -> Float[Array, "kinds scores"] | None:
    """Tables for all kinds, if some op is a single kernel whose law has no cheap closed form.
    Kernels drawn one by one always use tables.
    """
    table, residual = program.latencies, program.variability.residual
    direct = program.blocks.direct.value
    single = {table.kinds[kind] for kind in table.kind.value[direct[direct >= 0]]}
    closed = all(isinstance(residual[kind], LogNormal | Constant) for kind in single)
    if closed and program.resolution == "block":
        return None
    return jnp.stack([_relative(residual[kind], table.mean.dtype) for kind in table.kinds])


def _tabulate(law: AbstractLatency, dtype) -> Table:
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    return law.from_normal(scores).astype(dtype) * jnp.ones_like(scores)


def _relative(law: AbstractLatency, dtype) -> Table:
    return _tabulate(law, dtype) / law.mean().astype(dtype)


def _optional(law: AbstractLatency | None, dtype) -> Table | None:
    return None if law is None else _relative(law, dtype)


def _shares(rates: Float[Array, " stalls"]) -> Float[Array, " stalls"]:
    total = jnp.sum(rates)
    return jnp.cumsum(rates) / jnp.where(total > 0, total, 1)


def look_up(
    tables: Float[Array, "tables scores"],
    which: Int[Array, "*rows"],
    z: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """The quantile of the law `tables[which]` at the score `z`, linear between nodes."""
    step = 2 * SCORE_RANGE / (NUM_SCORES - 1)
    position = (z + z.dtype.type(SCORE_RANGE)) / z.dtype.type(step)
    low = jnp.clip(jax.lax.stop_gradient(jnp.floor(position)), 0, NUM_SCORES - 2)
    index = low.astype(jnp.int32) + which.astype(jnp.int32) * NUM_SCORES
    flat = tables.reshape(-1)
    below, above = flat[index], flat[index + 1]
    return below + (position - low) * (above - below)


def look_up_one(table: Table, z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`look_up` in a single table."""
    return look_up(table[None, :], jnp.zeros((1,) * z.ndim, jnp.int32), z)


def row_laws(
    plan: Plan,
    classes: np.ndarray,
    slowest: Float[Array, "rows samples"],
    nodes: Float[Array, " nodes"],
    regimes: Int[Array, " samples"],
) -> dict[str, Shaped[Array, "rows samples"]]:
    """What `latency` needs to know of each row's law in each sample, given the factor of its
    slowest GPU. Parts that no row needs are left out, for they would cost time.

    **Returns:**

    `mean`, `std` and `skewness` of collapsed kernels, zero for others; `own`, the mean of a kernel
    with a law of its own, zero for others, with its `sigma` or the number of its table `kind`.
    """
    direct = plan.program.blocks.direct.value[classes]
    alone = direct >= 0
    laws: dict[str, Any] = {}
    if not alone.all():
        position = jnp.zeros(slowest.shape, jnp.int32)
        for k in range(1, len(NODE_SCORES) - 1):
            position = position + (slowest >= nodes[k]).astype(jnp.int32)
        low, high = nodes[position], nodes[position + 1]
        flat = high <= low
        share = jnp.where(flat, 0, (slowest - low) / jnp.where(flat, 1, high - low))
        moments = plan.moments[:, classes].reshape(3, len(classes), -1)
        index = regimes[None, :] * len(NODE_SCORES) + position
        below = jnp.take_along_axis(moments, index[None], axis=2)
        above = jnp.take_along_axis(moments, index[None] + 1, axis=2)
        collapsed = below + share[None] * (above - below)
        collapsed = jnp.where(jnp.asarray(alone)[None, :, None], 0, collapsed)
        laws |= zip(("mean", "std", "skewness"), collapsed, strict=True)
    if alone.any():
        compute = jnp.asarray(plan.program.blocks.compute.value[classes])[:, None]
        laws["own"] = plan.mean[classes][:, regimes] * jnp.where(compute, slowest, 1)
        kinds = np.where(alone, plan.program.latencies.kind.value[direct], 0)[:, None]
        if plan.residuals is None:
            laws["sigma"] = plan.sigmas[kinds]
        else:
            laws["kind"] = jnp.asarray(kinds, jnp.int32)
    return laws


def latency(
    laws: dict[str, Shaped[Array, "*rows"]],
    residuals: Float[Array, "kinds scores"] | None,
    z: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Latencies at scores `z`, in seconds: the Wilson-Hilferty cube of `ThreeMoment` for what is
    collapsed; for what is one kernel a log-normal, or a table.
    """
    seconds = jnp.zeros((), z.dtype)
    adjusted = "spread factor" in laws
    if "mean" in laws:
        std = laws["std"] * laws["spread factor"] if adjusted else laws["std"]
        seconds = jnp.maximum(laws["mean"] + std * cube_normal(z, laws["skewness"]), 0)
    if "own" in laws:
        if residuals is None:
            sigma = laws["sigma"] * laws["spread factor"] if adjusted else laws["sigma"]
            shape = exp(sigma * (z - sigma / 2))
        else:
            shape = look_up(residuals, laws["kind"], z)
            shape = 1 + laws["spread factor"] * (shape - 1) if adjusted else shape
        seconds = seconds + laws["own"] * shape
    return seconds


def latency_score(
    laws: dict[str, Shaped[Array, "*rows"]],
    residuals: Float[Array, "kinds scores"] | None,
    seconds: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """The score at which an op of one class has a given latency: the inverse of `latency`."""
    if "mean" in laws:
        standard = (seconds - laws["mean"]) / laws["std"]
        return jnp.where(seconds > 0, cube_normal_score(standard, laws["skewness"]), -SCORE_RANGE)
    ratio = seconds / laws["own"]
    if residuals is None:
        sigma = laws["sigma"]
        positive = ratio > 0
        score = jnp.log(jnp.where(positive, ratio, 1)) / sigma + sigma / 2
        return jnp.where(positive, score, -SCORE_RANGE)
    return table_score(residuals[laws["kind"].reshape(-1)[0]], ratio)


def table_score(table: Table, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The score at which a table has a value, within its range: the inverse of `look_up_one`."""
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=table.dtype)
    return jnp.interp(value, table, scores)
