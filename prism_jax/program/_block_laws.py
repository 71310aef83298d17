"""The laws of the classes of a program's ops, given the factors that ops share."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._padding import bucket, pad
from ..collapse import (
    NODE_SCORES,
    Blocks,
    Overlaps,
    Stalls,
    class_moments,
    gpu_factors,
    segment_skewness,
    slowest_workers,
)
from ..host import on_host
from ..latency import AbstractLatency, Constant, root
from ..loads import Loads, Unevenness, fullest, with_draws
from ._program import Program, sizes_of
from ._table import kernel_cumulants, relative_cumulants, unit_of_time
from ._variability import Variability


# The scores of the factors that `block_laws_of` gives.
SCORES = np.linspace(-6.0, 6.0, 241)
# So many nodes before and after the middle one, between which a slope is taken.
_ABOUT = 2
# So many sizes of stalls stand for their law.
_SIZES = 64


class BlockLaws(eqx.Module):
    """What the collapse of kernels gives. Differentiable in the program's parameters.

    **Attributes:**

    - `moments`: mean, standard deviation and skewness of each class, by regime of the network and
        factor of the slowest GPU, in seconds.
    - `shared`: by how much a rank's other GPUs, given the slowest, make all its ops of a class
        vary together: a standard deviation in seconds.
    - `communication`: the moments of its communication alone, where a factor acts on compute only.
    - `loading`: what each class has of the factor of its microbatch, by regime, where there is one:
        the share of its compute; or, for a single kernel, its loading.
    - `load`: the standard deviation in seconds and the skewness of what the ops of a stage and
        microbatch share because their layers have the same loads; `None` if loads are equal.
    - `slack`: how much of a stall of each kind is hidden in a class, in seconds, by regime; `None`
        if nothing stalls.
    - `meeting`: the share of pairs of a class's stalls that are before the same wait on different
        members, of which the longer counts.
    - `skewness`: of the segments that members run by themselves.
    - `nodes`: the factors of the slowest GPU of a rank's group, and of all GPUs together.
    - `at_scores`: the same factors at given scores.
    - `in_step`, `of_data`: at the same scores, what the slowest worker's factors in the step and of
        its microbatch do; `None` unless workers wait for one another within a microbatch.
    - `on_network`: the factor on each kernel by regime.
    - `probabilities`: of the regimes of the network.
    """

    moments: Float[Array, "3 classes regimes nodes"]
    shared: Float[Array, "classes regimes nodes"]
    communication: Float[Array, "3 classes regimes"] | None
    loading: Float[Array, "classes regimes"] | None
    load: Float[Array, "2 classes regimes"] | None
    slack: Float[Array, "kinds classes regimes"] | None
    meeting: Float[Array, " classes"] | None
    skewness: Float[Array, " segments"]
    nodes: Float[Array, "2 nodes"]
    at_scores: Float[Array, "2 scores"]
    in_step: Float[Array, " scores"] | None
    of_data: Float[Array, " scores"] | None
    on_network: Float[Array, "kernels regimes"]
    probabilities: Float[Array, " regimes"]


def block_laws(
    blocks: Blocks,
    variability: Variability,
    mean: Float[Array, " kernels"],
    shapes: Float[Array, "3 kernels"],
    on_network: Bool[Array, " kernels"],
    members: Float[Array, "3 groups"],
    worker: Float[Array, ""] | None,
    scores: Float[Array, " scores"],
    loading: Float[Array, " kernels"] | None = None,
    loads: Loads | None = None,
    unevenness: Unevenness | None = None,
    stalling: Bool[Array, "kinds kernels"] | None = None,
) -> BlockLaws:
    """The laws of classes.

    **Arguments:**

    - `blocks`: their contents. If each is one kernel with a law of its own, moments are zero,
        because a graph of such ops is ready sooner without them.
    - `variability`: the factors that ops share.
    - `mean`, `shapes`, `on_network`: of each kernel, its mean in seconds, its law as of
        `relative_cumulants`, and whether the network's regime acts on it.
    - `members`, `worker`: as of `groups_of`.
    - `scores`: standard normal, of the factors `at_scores`.
    - `loading`: of the kernels, on the factor of a microbatch; one by default.
    - `loads`, `unevenness`: the loads of members of expert-parallel groups.
    - `stalling`: whether a kernel has stalls of a kind; `None` if none has.
    """
    dtype, unit = mean.dtype, unit_of_time(mean)
    cumulants = kernel_cumulants(mean / unit, shapes)
    probabilities = jnp.ones((1,), dtype)
    network = jnp.ones((len(mean), 1), dtype)
    if variability.network is not None:
        regimes = variability.network.factors().astype(dtype)
        probabilities = variability.network.probabilities().astype(dtype)
        network = jnp.where(on_network[:, None], regimes[None, :], 1)
    counts, sizes, lines = members
    slowest = in_step = of_data = slopes = None
    if worker is None:
        groups, at_scores = gpu_factors(variability.rank, counts, scores, sizes, lines)
    else:
        data: Any = variability.microbatch
        laws = variability.rank, variability.worker_step, data
        slowest = slowest_workers(laws, worker, counts, sizes, lines, scores)
        groups, at_scores = slowest.groups, slowest.at_scores
        in_step, of_data = slowest.in_step, slowest.of_data
    load = of_load = of_stalls = None
    if loads is not None and unevenness is not None:
        load = fullest(loads, unevenness, _gpu_spread(variability.rank, dtype))
    by_data = variability.microbatch is not None
    apart = by_data or variability.worker_step is not None
    direct: Any = blocks.direct
    if blocks.segments is None:
        moments = jnp.zeros((3, len(direct), *network.shape[1:], groups.slowest.shape[1]), dtype)
        shared, communication = moments[0], moments[..., 0] if apart else None
        skewness = jnp.zeros((1,), dtype)
    else:
        stalls = None
        if stalling is not None:
            rates, lengths = _stalls_of(variability, unit)
            stalls = Stalls(rates, counts[0], lengths, stalling.astype(dtype))
        moments, shared, communication, of_load, of_stalls = class_moments(
            blocks, cumulants, network, groups, loads, load, stalls, apart=apart
        )
        skewness = segment_skewness(blocks, cumulants)
    if slowest is not None:
        # What other workers share moves with the slowest's microbatch, as far as it is of these.
        of_others = slowest.shared_by_data * shared[..., len(NODE_SCORES) // 2]
        slopes = root(_slopes(moments[0], groups.slowest[0]) ** 2 + of_others**2)
        shared = slowest.persistent * shared
    seconds = jnp.stack([unit, unit, jnp.ones_like(unit)])[:, None, None]
    return BlockLaws(
        moments=moments * seconds[..., None],
        shared=shared * unit,
        communication=None if communication is None else communication * seconds,
        loading=_loadings(moments, communication, direct, loading, slopes) if by_data else None,
        load=None if of_load is None else of_load * seconds[1:],
        slack=None if of_stalls is None else of_stalls[0] * unit,
        meeting=None if of_stalls is None else of_stalls[1],
        skewness=skewness,
        nodes=groups.slowest[:2],
        at_scores=at_scores[:2],
        in_step=in_step,
        of_data=of_data,
        on_network=network,
        probabilities=probabilities,
    )


def block_laws_of(program: Program) -> BlockLaws:
    """`block_laws` of all of a program, on the host."""
    table, sizes, loads = program.latencies, sizes_of(program), program.loads
    dtype, constant = table.mean.dtype, Constant(jnp.ones((), table.mean.dtype))
    laws = [program.variability.residual.get(kind, constant) for kind in table.kinds]
    shapes = np.asarray(on_host(relative_cumulants, laws, dtype))[:, np.array(table.kind)]
    more = (0, 0), (0, sizes["kernels"] - len(table.mean))
    if (stalling := stalling_of(program)) is not None:
        stalling = np.pad(stalling, more)
    table = pad(dataclasses.replace(table, kinds=(), kind=(), sizes=()), sizes, dtype)
    return on_host(
        block_laws,
        pad(blocks_of(program), sizes, dtype),
        program.variability,
        table.mean,
        np.pad(shapes, more),
        table.on_network,
        *groups_of(program),
        SCORES.astype(dtype),
        table.loading,
        loads and pad(with_draws(loads), sizes, dtype),
        loads and loads.unevenness,
        stalling,
    )


def _slopes(mean, nodes) -> Float[Array, "classes regimes"]:
    """The derivative of means with respect to the logarithm of the factor of the slowest worker."""
    middle = len(NODE_SCORES) // 2
    low, high = middle - _ABOUT, middle + _ABOUT
    step = (nodes[high] - nodes[low]) / nodes[middle]
    return (mean[..., high] - mean[..., low]) / jnp.where(step > 0, step, 1)


def _loadings(moments, communication, direct, loading, slopes) -> Float[Array, "classes regimes"]:
    """The loading of each class on the factor of a microbatch. Of a block, it is the share of
    compute in the mean, to first order in the factor: where a collective decides, compute beside it
    does not count. The slowest GPU hardly changes it, so it is that of the middle node.
    """
    middle = moments.shape[-1] // 2
    means = moments[0, :, :, middle]
    there = jnp.where(means > 0, means, 1)
    share = 1 - communication[0] / there
    share = share if slopes is None else slopes / there
    single = 1 if loading is None else loading[direct][:, None]
    return jnp.where(direct[:, None] >= 0, single, share)


def _stalls_of(variability: Variability, unit) -> tuple[Float[Array, " kinds"], Array]:
    """The rates of stalls, and equally likely sizes of those of each kind."""
    scores = jax.scipy.special.ndtri((jnp.arange(_SIZES, dtype=unit.dtype) + 0.5) / _SIZES)
    stalls = [variability.stalls[kind] for kind in sorted(variability.stalls)]
    sizes = [s.size.from_normal(scores.astype(s.size.dtype)) for s in stalls]
    sizes = jnp.stack([jnp.broadcast_to(size, scores.shape) for size in sizes])
    return jnp.stack([stall.rate for stall in stalls]).astype(unit.dtype), sizes / unit


def _gpu_spread(law: AbstractLatency | None, dtype) -> Float[Array, ""]:
    """The standard deviation of a GPU's factor over its mean."""
    if law is None:
        return jnp.zeros((), dtype)
    variance = law.variance()
    varies = variance > 0  # The square root of zero has no derivative.
    std = jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1)), 0)
    return (std / law.mean()).astype(dtype)


def blocks_of(program: Program) -> Blocks:
    """The contents of the classes of a program, as a plan has them: with the groups of GPUs of
    members, and branches padded, whose inner axis is that of segments or of classes.
    """
    blocks, sizes, most = program.blocks, sizes_of(program), program.group_size
    if blocks.segments is None:
        return blocks

    def of_branches(branches: Overlaps | None, inner: str) -> Overlaps | None:
        if branches is None:
            return None
        room = {"inner": sizes[inner], "branches": bucket(len(branches.slowdowns), 8)}
        return pad(branches, sizes | room, program.latencies.mean.dtype)

    if (waits := blocks.waits) is not None:
        parts = _parts(program)
        pairs = zip(waits.size.tolist(), (waits.count * waits.size).tolist(), strict=True)
        waits = dataclasses.replace(
            waits,
            count=np.minimum(waits.count, most // waits.size),
            group=np.array([2 + parts.index((size, max(gpus, most))) for size, gpus in pairs]),
        )
    members: Any = blocks.members
    return dataclasses.replace(
        blocks,
        members=np.where(_in_tail(program), members, np.minimum(members, most)),
        branches=of_branches(blocks.branches, "segments"),
        outer_branches=of_branches(blocks.outer_branches, "classes"),
        waits=waits,
        group=_groups(program),
    )


def stalling_of(program: Program) -> Bool[np.ndarray, "kinds kernels"] | None:
    """Whether a kernel has stalls of a kind; `None` if nothing stalls."""
    if not len(program.stall_ops):
        return None
    kinds = np.array(program.latencies.kinds)[np.array(program.latencies.kind)]
    return kinds == np.array(sorted(program.variability.stalls))[:, None]


def groups_of(
    program: Program,
) -> tuple[Float[np.ndarray, "3 groups"], Float[np.ndarray, ""] | None]:
    """The groups of GPUs of a rank, of all ranks, and of a rank again for each of `_parts`: how
    many GPUs each has, the size, and how many GPUs are averaged. And how many GPUs a worker has,
    where workers have factors of their own and wait for one another.
    """
    dtype, size = program.latencies.mean.dtype, program.group_size
    groups = [(size, 1, 1), (program.world_size, 1, 1)]
    groups += [(size, smaller, most / size) for smaller, most in _parts(program)]
    worker = np.asarray(program.worker_size, dtype) if _differ(program) else None
    return np.array(groups, dtype).T, worker


def _differ(program: Program) -> bool:
    laws = program.variability.worker_step, program.variability.microbatch
    return program.worker_size < program.group_size and laws != (None, None)


def _parts(program: Program) -> list[tuple[int, int]]:
    """The sizes of groups that wait for one another within a rank, or of single GPUs, each with how
    many GPUs wait, which are more than the rank has where they are lines of GPUs of several ranks.
    """
    size, blocks = program.group_size, program.blocks
    parts = {(1, size)} if _differ(program) else set()
    if blocks.members is not None:
        members = np.asarray(blocks.members)[~_in_tail(program)]
        parts |= {(1, number) for number in members.tolist() if number > size}
    if (waits := blocks.waits) is not None:
        pairs = zip(waits.size.tolist(), (waits.count * waits.size).tolist(), strict=True)
        parts |= {(smaller, max(gpus, size)) for smaller, gpus in pairs}
    return sorted(parts)


def _in_tail(program: Program) -> Bool[np.ndarray, " segments"]:
    segments: Any = program.blocks.class_segments
    return (segments[program.tail] > 0) & (program.tail >= 0)


def _groups(program: Program) -> np.ndarray:
    """The group whose factors the members of each segment have, of `groups_of`."""
    size, members = program.group_size, np.asarray(program.blocks.members)
    alone = program.worker_size if _differ(program) else size
    # Those of single GPUs come first.
    lines = [most for smaller, most in _parts(program) if smaller == 1]
    of_rank = 2 + np.searchsorted(lines, np.maximum(members, size))
    return np.where(_in_tail(program), 1, np.where(members > alone, of_rank, 0))
