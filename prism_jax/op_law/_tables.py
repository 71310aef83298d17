"""Tables of the laws of classes of ops, which follow from a program's parameters: computed once
before any sample is drawn.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._padding import bucket, pad
from ..latency import AbstractLatency, Constant, least_std, log_sigma, root
from ..loads import Unevenness, fullest
from ..program import (
    Adjustment,
    LatencyTable,
    Program,
    Sets,
    Stall,
    Variability,
    all_laws,
    sizes_of,
)
from ._block import ClassMoments, class_moments
from ._classes import Classes, all_kinds
from ._segment import NODE_SCORES, GroupFactors, gpu_factors
from ._stalls import Stalls
from ._workers import Slowest, slowest_workers


# So many more stalls than the most of any stratum have all of the rest that matters: with the rates
# and strata of `assemble`, each number has less than 0.4 of the probability of the one before.
_MORE_STALLS = 16
# So many nodes before and after the middle one, between which a slope is taken.
_ABOUT = 2
# So many sizes of stalls stand for their law.
_SIZES = 64
# Quantile tables are uniform in the standard-normal score, which keeps their error small in tails.
SCORE_RANGE = 6.0
NUM_SCORES = 2049

Table = Float[Array, " scores"]
# Tables of laws, `(kinds, scores)`: an array, or in a kernel what reads one in its memory.
Residuals = Any


class Tables(eqx.Module):
    """Tables from which latencies are looked up. Differentiable in the program's parameters.

    **Attributes:**

    - `laws`: of each of `all_laws`, its mean, and its relative variance and third central moment,
        to be checked.
    - `moments`: mean, standard deviation and skewness of each class, by regime of the network and
        factor of the slowest GPU, in seconds; zero for a class that is one kernel with a law of its
        own.
    - `shared`: by how much a rank's other GPUs, given the slowest, make all its ops of a class
        vary together: a standard deviation in seconds. `None` where GPUs are equal.
    - `communication`: the same of its communication alone, where compute has factors of its own in
        each step.
    - `skewness`: of the segments that members run by themselves.
    - `nodes`, `tail_nodes`: those factors, for a rank's group and for all GPUs together.
    - `mean`: of each class that is one kernel with a law of its own, by regime, in seconds.
    - `sigmas`: that law's shape, for each kind of kernel, where it is log-normal or constant.
    - `residuals`: tables of that shape where it is neither; `None` where no op needs one.
    - `slowest`, `tail_slowest`, `worker_step`, `microbatch`, `step`: tables of the shared factors,
        of `microbatch` perhaps sets.
    - `loading`: what each class has of the factor of its microbatch, by regime: the share of its
        compute; or, for a single kernel, its loading. `None` where no such factor varies.
    - `load`: the standard deviation in seconds and the skewness of what ops of a stage and
        microbatch share by the loads of their layers, for each class, by regime; `None` if loads
        are equal.
    - `stall_shares`: the share of each entry of `Replica.stall_op`; `stall_sizes` by kind.
    - `stall_slack`: by kind, class and regime, how much of a stall is hidden, in seconds.
    - `stall_meeting`: by class, how likely two stalls of an op are before the same wait.
    - `stall_counts`: the probabilities of 0, 1 ... stalls of a replica.
    - `network`: the probabilities of the regimes.
    - `adjustment`: the factors of the program's.
    """

    laws: Float[Array, "3 laws"]
    moments: Float[Array, "3 classes regimes nodes"]
    shared: Float[Array, "classes regimes nodes"] | None
    communication: Float[Array, "3 classes regimes"] | None
    skewness: Float[Array, " segments"]
    nodes: Float[Array, " nodes"]
    tail_nodes: Float[Array, " nodes"]
    mean: Float[Array, "classes regimes"]
    sigmas: Float[Array, " kinds"]
    residuals: Float[Array, "kinds scores"] | None
    slowest: Table | None
    tail_slowest: Table | None
    worker_step: Table | None
    microbatch: Table | Float[Array, "stretches factors"] | None
    loading: Float[Array, "classes regimes"] | None
    load: Float[Array, "2 classes regimes"] | None
    step: Table | None
    stall_shares: Float[Array, " stalls"] | None
    stall_sizes: Float[Array, "stall_kinds scores"] | None
    stall_slack: Float[Array, "stall_kinds classes regimes"] | None
    stall_meeting: Float[Array, " classes"] | None
    stall_counts: Float[Array, " counts"]
    network: Float[Array, " regimes"]
    adjustment: Adjustment | None


class Varied(NamedTuple):
    """The parts of a program that have parameters, without all else. A plan has a law for each kind
    that there is.
    """

    variability: Variability
    latencies: LatencyTable
    adjustment: Adjustment | None
    unevenness: Unevenness | None


def look_up(tables: Residuals, which: Any, z: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
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


def table_score(table: Table, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The score at which a table has a value, within its range: the inverse of `look_up_one`."""
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=table.dtype)
    return jnp.interp(value, table, scores)


def tabulate(classes: Classes, parameters: Varied) -> Tables:
    """The tables of classes of ops and parameters."""
    variability, mean = parameters.variability, parameters.latencies.mean
    dtype, unit, blocks = mean.dtype, unit_of_time(mean), classes.blocks
    laws = [*map(variability.residual.__getitem__, sorted(variability.residual))]
    stalls = [*map(variability.stalls.__getitem__, sorted(variability.stalls))]
    shapes = relative_cumulants(laws, dtype)
    cumulants = kernel_cumulants(mean / unit, shapes[:, classes.kind])
    probabilities, network = jnp.ones((1,), dtype), jnp.ones((len(mean), 1), dtype)
    if variability.network is not None:
        regimes = variability.network.factors().astype(dtype)
        probabilities = variability.network.probabilities().astype(dtype)
        network = jnp.where(classes.on_network[:, None], regimes[None, :], 1)
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    counts, sizes, lines = classes.members
    in_step = _factors(variability.worker_step, dtype)
    if classes.worker is None:
        workers, of_data = None, _factors(variability.microbatch, dtype)
        groups, at_scores = gpu_factors(variability.rank, counts, scores, sizes, lines)
    else:
        data: Any = variability.microbatch
        factors = variability.rank, variability.worker_step, data
        workers = slowest_workers(factors, classes.worker, counts, sizes, lines, scores)
        groups, at_scores = workers.groups, workers.at_scores
        in_step = None if in_step is None else workers.in_step
        of_data = None if data is None else workers.of_data
    of_classes = _moments(classes, parameters, cumulants, network, groups, unit)
    shared, loading = of_classes.shared, None
    if variability.microbatch is not None:
        of_kernels = parameters.latencies.loading
        loading = _loadings(of_classes, blocks.direct, of_kernels, groups, workers)
    if workers is not None:
        shared = workers.persistent * shared
    sigmas = map(log_sigma, laws)  # Of log-normal laws.
    # These are only checked.
    checked = jax.lax.stop_gradient(list(all_laws(variability).values())[len(laws) :])
    if checked:
        shapes = jnp.concatenate([shapes, relative_cumulants(checked, dtype)], axis=1)
    single = (blocks.direct >= 0)[:, None]
    rates, of_stalls = _rates(stalls, classes), [_at_scores(stall.size, dtype) for stall in stalls]
    differ = variability.rank is not None or classes.worker is not None
    seconds = jnp.stack([unit, unit, jnp.ones_like(unit)])[:, None, None]
    apart = None if variability.worker_step is None else of_classes.communication
    return Tables(
        laws=jax.lax.stop_gradient(shapes),
        moments=jnp.where(single[..., None], 0, of_classes.moments * seconds[..., None]),
        shared=shared * unit if differ else None,
        communication=None if apart is None else apart * seconds,
        skewness=of_classes.skewness,
        nodes=groups.slowest[0],
        tail_nodes=groups.slowest[1],
        mean=jnp.where(single, mean[blocks.direct][:, None] * network[blocks.direct], 0),
        sigmas=_of_kinds([jnp.asarray(0.0 if s is None else s, dtype) for s in sigmas]),
        residuals=_of_kinds([_factors(law, dtype) for law in laws]) if classes.tables else None,
        slowest=at_scores[0] if differ else None,
        tail_slowest=at_scores[1] if differ else None,
        worker_step=in_step,
        microbatch=of_data,
        loading=loading,
        load=None if of_classes.load is None else of_classes.load * seconds[1:],
        step=_factors(variability.step, dtype),
        stall_shares=None if rates is None else _shares(rates).astype(dtype),
        stall_sizes=None if rates is None else jnp.stack(of_stalls),
        stall_slack=None if of_classes.slack is None else of_classes.slack * unit,
        stall_meeting=of_classes.meeting,
        stall_counts=_counts(rates, classes, dtype),
        network=probabilities,
        adjustment=parameters.adjustment,
    )


def unit_of_time(mean: Float[Array, " kernels"]) -> Float[Array, ""]:
    """A unit of time in which no mean latency is above 1.5: a power of two, in seconds, so that a
    change of unit rounds nothing.
    """
    longest = jax.lax.stop_gradient(jnp.max(mean))
    nearest = jax.lax.reduce_precision(longest, jnp.finfo(mean.dtype).nexp, 0)
    return jnp.where(longest > 0, nearest, 1)


def relative_cumulants(laws: Sequence[AbstractLatency], dtype: DTypeLike) -> Float[Array, "3 laws"]:
    """The mean of each law, and its variance and third central moment over powers of the mean."""
    moments = [(law.mean(), law.variance(), law.third_moment()) for law in laws]
    mean, variance, third = map(jnp.stack, zip(*moments, strict=True))
    return jnp.stack([mean, variance / mean**2, third / mean**3]).astype(dtype)


def kernel_cumulants(
    mean: Float[Array, " kernels"], shapes: Float[Array, "3 kernels"]
) -> Float[Array, "3 kernels"]:
    """Mean, variance and third central moment of each kernel, in the unit of the means to their
    power. Kernels whose deviation is so small in this unit that its cube underflows are constant.

    **Arguments:**

    - `mean`: the mean latency of each kernel, in `unit_of_time` all.
    - `shapes`: the law of each, as of `relative_cumulants`, of which only the shape counts.
    """
    variance, third = shapes[1] * mean**2, shapes[2] * mean**3
    varies = variance > least_std(mean.dtype) ** 2
    return jnp.stack([mean, jnp.where(varies, variance, 0), jnp.where(varies, third, 0)])


def _moments(
    classes: Classes,
    parameters: Varied,
    cumulants: Float[Array, "3 kernels"],
    network: Float[Array, " kernels regimes"],
    groups: GroupFactors,
    unit: Float[Array, ""],
) -> ClassMoments:
    """The moments of classes in a unit of time: zero if each is one kernel with a law of its own,
    because a graph of such ops is ready sooner without them.
    """
    blocks, variability, dtype = classes.blocks, parameters.variability, unit.dtype
    apart = variability.microbatch is not None or variability.worker_step is not None
    load = stalls = None
    if classes.loads is not None and parameters.unevenness is not None:
        gpu_spread = _gpu_spread(variability.rank, dtype)
        load = fullest(classes.loads, parameters.unevenness, gpu_spread)
    if blocks.segments is None:
        shape = len(blocks.direct), network.shape[1], groups.slowest.shape[1]
        none = jnp.zeros((3, *shape), dtype)
        communication = none[..., 0] if apart else None
        return ClassMoments(jnp.zeros((1,), dtype), none, none[0], communication)
    if classes.stalling is not None:
        stalls = _stalls_of(variability, classes, unit)
    return class_moments(
        blocks, cumulants, network, groups, classes.loads, load, stalls, apart=apart
    )


def _loadings(
    of_classes: ClassMoments,
    direct: Any,
    of_kernels: Float[Array, " kernels"] | None,
    groups: GroupFactors,
    workers: Slowest | None,
) -> Float[Array, "classes regimes"]:
    """The loading of each class on the factor of a microbatch. Of a block, it is the share of
    compute in the mean, to first order in the factor: where a collective decides, compute beside it
    does not count. The slowest GPU hardly changes it, so it is that of the middle node. Where
    workers wait for one another, it is the slope on the logarithm of the slowest one's factor.
    """
    means, middle = of_classes.moments[0], len(NODE_SCORES) // 2
    there = jnp.where(means[..., middle] > 0, means[..., middle], 1)
    if workers is None:
        communication = of_classes.communication
        assert communication is not None
        share = 1 - communication[0] / there
    else:
        nodes, low, high = groups.slowest[0], middle - _ABOUT, middle + _ABOUT
        step = (nodes[high] - nodes[low]) / nodes[middle]
        slopes = (means[..., high] - means[..., low]) / jnp.where(step > 0, step, 1)
        # What other workers share moves with the slowest's microbatch, as far as it is of these.
        of_others = workers.shared_by_data * of_classes.shared[..., middle]
        share = root(slopes**2 + of_others**2) / there
    single = 1 if of_kernels is None else of_kernels[direct][:, None]
    return jnp.where(direct[:, None] >= 0, single, share)


def _stalls_of(variability: Variability, classes: Classes, unit) -> Stalls:
    """The stalls of kernels, with equally likely sizes of those of each kind."""
    stalling: Any = classes.stalling
    scores = jax.scipy.special.ndtri((jnp.arange(_SIZES, dtype=unit.dtype) + 0.5) / _SIZES)
    stalls = [variability.stalls[kind] for kind in sorted(variability.stalls)]
    sizes = [s.size.from_normal(scores.astype(s.size.dtype)) for s in stalls]
    sizes = jnp.stack([jnp.broadcast_to(size, scores.shape) for size in sizes])
    rates = jnp.stack([stall.rate for stall in stalls]).astype(unit.dtype)
    return Stalls(rates, classes.members[0, 0], sizes / unit, stalling.astype(unit.dtype))


def _gpu_spread(law: AbstractLatency | None, dtype) -> Float[Array, ""]:
    """The standard deviation of a GPU's factor over its mean."""
    return (
        jnp.zeros((), dtype) if law is None else (root(law.variance()) / law.mean()).astype(dtype)
    )


def _rates(stalls: Sequence[Stall], classes: Classes) -> Float[Array, " stalls"] | None:
    """Expected stalls of each op and kind that may stall, in one replica's step."""
    if classes.stall_kind is None or classes.stall_calls is None:
        return None
    rates = jnp.stack([stall.rate for stall in stalls])
    return rates[classes.stall_kind] * classes.stall_calls.astype(rates.dtype)


def _shares(rates: Float[Array, " stalls"]) -> Float[Array, " stalls"]:
    total = jax.lax.stop_gradient(jnp.sum(rates))
    # Twice, because the derivative of the second division has the square of what it divides by.
    rates = rates / jnp.where(total > 0, total, 1)
    return rates / jnp.where(total > 0, jnp.sum(rates), 1)


def _counts(rates, classes: Classes, dtype) -> Float[Array, " counts"]:
    """The probability of 0, 1, ... stalls in one replica's step, up to the most of any stratum,
    which stands for itself and more.
    """
    if rates is None:
        return jnp.ones((1,), dtype)
    rate = jnp.sum(rates)
    # Each from the one before it: powers and factorials alone overflow. A rate of zero and its
    # derivative are right. The last is a sum of more terms, for one minus a sum has few digits.
    terms = [jnp.exp(-rate)]
    for k in range(1, 1 + classes.stall_counts + _MORE_STALLS):
        terms.append(terms[-1] * rate / k)
    law = jnp.stack(terms)
    number = jnp.arange(len(terms), dtype=jnp.int32)
    last = jnp.sum(jnp.where(number >= classes.most_stalls, law, 0))
    law = jnp.where(number < classes.most_stalls, law, 0)
    law = jnp.where(number == classes.most_stalls, last, law)
    return law[: 1 + classes.stall_counts].astype(dtype)


def _of_kinds(values: list[Array]) -> Float[Array, "kinds ..."]:
    """With as many kinds as there is room for."""
    return jnp.stack(
        [*values, *[jnp.ones_like(values[0])] * (bucket(len(values), 16) - len(values))]
    )


def _at_scores(law: AbstractLatency, dtype) -> Table:
    scores = jnp.linspace(-SCORE_RANGE, SCORE_RANGE, NUM_SCORES, dtype=dtype)
    return law.from_normal(scores).astype(dtype) * jnp.ones_like(scores)


def _factors(law: AbstractLatency | Sets | None, dtype) -> Any:
    """A law relative to its mean, in a table; sets as they are; `None` for none."""
    if law is None:
        return None
    if isinstance(law, Sets):
        return (law.factors / law.mean()).astype(dtype)
    return _at_scores(law, dtype) / law.mean().astype(dtype)


def parameters_of(program: Program) -> Varied:
    """The parameters of a program, padded."""
    table, adjustment = program.latencies, program.adjustment
    sizes, dtype = sizes_of(program), table.mean.dtype
    return Varied(
        every_kind(program),
        pad(LatencyTable(table.mean, loading=table.loading), sizes, dtype),
        adjustment and pad(dataclasses.replace(adjustment, group=None), sizes, dtype),
        program.loads and program.loads.unevenness,
    )


def exact_gradients(program: Program, of_parameters: Varied) -> Program:
    """The derivatives with respect to the program from those with respect to its parameters, whose
    first axis are figures: a program with `None` for everything that is not a float.
    """

    def leaves(program: Any, unevenness: Any) -> list[Any]:
        table, adjustment = program.latencies, program.adjustment
        factors = adjustment and (adjustment.latency, adjustment.spread, adjustment.gpu)
        return jax.tree.leaves(
            (program.variability, table.mean, table.loading, factors, unevenness)
        )

    def of_program(program: Program) -> list[Any]:
        return leaves(program, program.loads and program.loads.unevenness)

    residual = {k: of_parameters.variability.residual[k] for k in program.variability.residual}
    laws = dataclasses.replace(of_parameters.variability, residual=residual)
    derivatives = leaves(of_parameters._replace(variability=laws), of_parameters.unevenness)
    parameters = eqx.filter(program, eqx.is_inexact_array)
    pairs = zip(derivatives, of_program(parameters), strict=True)
    exact = [jnp.asarray(x[:, *map(slice, like.shape)]) for x, like in pairs]
    return eqx.tree_at(of_program, parameters, exact)


def every_kind(program: Program) -> Variability:
    """The laws of a program, with one for each of `all_kinds`."""
    constant = Constant(np.ones((), program.latencies.mean.dtype))
    laws = program.variability.residual
    residual = {kind: laws.get(kind, constant) for kind in all_kinds(program)}
    return dataclasses.replace(program.variability, residual=residual)
