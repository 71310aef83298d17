"""The laws of the classes of a program's ops, given the factors that ops share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..collapse import (
    Collapse,
    Overlaps,
    Sides,
    class_moments,
    gpu_factors,
    segment_skewness,
)
from ..latency import AbstractLatency, Constant
from ..loads import Loads, Unevenness, fullest
from ..maxplus import bucket
from ._program import Program
from ._table import kernel_cumulants, relative_cumulants, unit_of
from ._variability import Variability


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
    - `skewness`: of the segments that members run by themselves.
    - `nodes`: the factors of the slowest GPU of a rank's group, and of all GPUs together.
    - `at_scores`: the same factors at given scores.
    - `on_network`: the factor on each kernel by regime.
    - `probabilities`: of the regimes of the network.
    """

    moments: Float[Array, "3 classes regimes nodes"]
    shared: Float[Array, "classes regimes nodes"]
    communication: Float[Array, "3 classes regimes"] | None
    loading: Float[Array, "classes regimes"] | None
    load: Float[Array, "2 classes regimes"] | None
    skewness: Float[Array, " segments"]
    nodes: Float[Array, "2 nodes"]
    at_scores: Float[Array, "2 scores"]
    on_network: Float[Array, "kernels regimes"]
    probabilities: Float[Array, " regimes"]


def block_laws(
    collapse: Collapse | None,
    variability: Variability,
    mean: Float[Array, " kernels"],
    shapes: Float[Array, "3 kernels"],
    on_network: Bool[Array, " kernels"],
    members: Float[Array, "2"],
    scores: Float[Array, " scores"],
    direct: Int[Array, " classes"],
    loading: Float[Array, " kernels"] | None = None,
    loads: Loads | None = None,
    unevenness: Unevenness | None = None,
) -> BlockLaws:
    """The laws of classes.

    **Arguments:**

    - `collapse`: their contents; `None` if each is one kernel with a law of its own, whose moments
        are then zero, because a graph of such ops is ready sooner without them.
    - `variability`: the factors that ops share.
    - `mean`, `shapes`, `on_network`: of each kernel, its mean in seconds, its law as of
        `relative_cumulants`, and whether the network's regime acts on it.
    - `members`: the number of GPUs in the group of a rank, and the number of all GPUs.
    - `scores`: standard normal, of the factors `at_scores`.
    - `direct`: the only kernel of each class, or -1.
    - `loading`: of the kernels, on the factor of a microbatch; one by default.
    - `loads`, `unevenness`: the loads of members of expert-parallel groups.
    """
    dtype, unit = mean.dtype, unit_of(mean)
    cumulants = kernel_cumulants(mean / unit, shapes)
    probabilities = jnp.ones((1,), dtype)
    network = jnp.ones((len(mean), 1), dtype)
    if variability.network is not None:
        regimes = variability.network.factors().astype(dtype)
        probabilities = variability.network.probabilities().astype(dtype)
        network = jnp.where(on_network[:, None], regimes[None, :], 1)
    groups, at_scores = gpu_factors(variability.rank, members, scores)
    load = of_load = None
    if loads is not None and unevenness is not None:
        load = fullest(loads, unevenness, _gpu_spread(variability.rank, dtype))
    by_data = variability.microbatch is not None
    apart = by_data or variability.worker_step is not None
    if collapse is None:
        moments = jnp.zeros((3, len(direct), *network.shape[1:], groups.slowest.shape[1]), dtype)
        shared, communication = moments[0], moments[..., 0] if apart else None
        skewness = jnp.zeros((1,), dtype)
    else:
        moments, shared, communication, of_load = class_moments(
            collapse, cumulants, network, groups, load, apart=apart
        )
        skewness = segment_skewness(collapse, cumulants)
    seconds = jnp.stack([unit, unit, jnp.ones_like(unit)])[:, None, None]
    return BlockLaws(
        moments=moments * seconds[..., None],
        shared=shared * unit,
        communication=None if communication is None else communication * seconds,
        loading=_loadings(moments, communication, direct, loading) if by_data else None,
        load=None if of_load is None else of_load * seconds[1:],
        skewness=skewness,
        nodes=groups.slowest,
        at_scores=at_scores,
        on_network=network,
        probabilities=probabilities,
    )


def block_laws_of(program: Program) -> BlockLaws:
    """`block_laws` of all of a program."""
    table, number, loads = program.latencies, kernels_of(program), program.loads
    dtype, constant = table.mean.dtype, Constant(jnp.ones((), table.mean.dtype))
    laws = [program.variability.residual.get(kind, constant) for kind in table.kinds]
    kind, room = table.kind.value, number - len(table.mean)
    shapes = relative_cumulants(laws, dtype)[:, kind]
    return block_laws(
        collapse_of(program),
        program.variability,
        jnp.pad(table.mean, (0, room)),
        jnp.pad(shapes, ((0, 0), (0, room))),
        jnp.pad(jnp.asarray(table.on_network.value), (0, room)),
        jnp.asarray([program.group_size, program.world_size], dtype),
        jnp.zeros((1,), dtype),
        _direct(program),
        None if table.loading is None else jnp.pad(table.loading, (0, room)),
        loads and loads.laws(dtype),
        loads and loads.unevenness,
    )


def _direct(program: Program) -> Int[Array, " classes"]:
    direct = program.blocks.direct.value
    room = classes_of(program) - len(direct)
    return jnp.asarray(np.pad(direct, (0, room), constant_values=-1), jnp.int32)


def _loadings(moments, communication, direct, loading) -> Float[Array, "classes regimes"]:
    """The loading of each class on the factor of a microbatch. Of a block, it is the share of
    compute in the mean, to first order in the factor: where a collective decides, compute beside it
    does not count. The slowest GPU hardly changes it, so it is that of the middle node.
    """
    whole = moments[0, :, :, moments.shape[-1] // 2]
    share = 1 - communication[0] / jnp.where(whole > 0, whole, 1)
    single = 1 if loading is None else loading[direct][:, None]
    return jnp.where(direct[:, None] >= 0, single, share)


def _gpu_spread(law: AbstractLatency | None, dtype) -> Float[Array, ""]:
    """The standard deviation of a GPU's factor over its mean."""
    if law is None:
        return jnp.zeros((), dtype)
    variance = law.variance()
    varies = variance > 0  # The square root of zero has no derivative.
    std = jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1)), 0)
    return (std / law.mean()).astype(dtype)


def collapse_of(program: Program) -> Collapse | None:
    """The contents of the classes of a program; `None` if each is one kernel."""
    blocks, dtype = program.blocks, program.latencies.mean.dtype
    if (blocks.direct.value >= 0).all():
        return None
    members = blocks.members.value
    num_segments = bucket(len(members), 32)
    num_kernels, num_classes = kernels_of(program), classes_of(program)
    return Collapse(
        segments=_matrix(blocks.segments.value, (num_segments, num_kernels), dtype),
        class_segments=_matrix(blocks.class_segments.value, (num_classes, num_segments), dtype),
        class_collectives=_matrix(
            blocks.class_collectives.value, (num_classes, num_kernels), dtype
        ),
        members=_matrix(members, (num_segments,), dtype),
        # A group as large as the world is the world.
        group=_matrix(members > program.group_size, (num_segments,), np.int32),
        overlaps=_overlaps(program, blocks.branches, num_segments),
        outer_overlaps=_overlaps(program, blocks.outer_branches, num_classes),
        loads=program.loads and program.loads.of_kernels(num_kernels, dtype),
        layers=program.loads and _matrix(program.loads.layers.value, (num_classes,), dtype),
    )


def _overlaps(program: Program, sides: Sides, num_inner: int) -> Overlaps | None:
    dtype = program.latencies.mean.dtype
    number, rows, _ = sides.communication.value.shape
    if not number:
        return None
    room, num_classes = bucket(number, 8), classes_of(program)
    kernels = (room, rows, kernels_of(program))
    return Overlaps(
        compute=_matrix(sides.compute.value, (room, num_inner), dtype),
        communication=_matrix(sides.communication.value, kernels, dtype),
        slowdowns=_matrix(sides.slowdowns.value, (room, 2), dtype),
        classes=_matrix(sides.classes.value, (num_classes, room), dtype),
    )


def classes_of(program: Program) -> int:
    """How many classes there is room for."""
    return bucket(len(program.blocks.direct.value), 64)


def kernels_of(program: Program) -> int:
    """How many kernels there is room for."""
    return bucket(len(program.latencies.kind.value), 64)


def _matrix(array: np.ndarray, shape: tuple[int, ...], dtype) -> Shaped[Array, "..."]:
    whole = np.zeros(shape, dtype)
    whole[tuple(map(slice, array.shape))] = array
    return jax.device_put(whole)
