"""What a program is, apart from the values of its parameters, as index arrays."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from ..maxplus import Lanes, bucket, in_lanes, to_lanes
from ..program import KINDS, Collapse, Program
from ._sequences import Sequences, sequences_of
from ._strata import Strata, strata_of


class Mixed(eqx.Module):
    """Which kinds of law there are among some classes: what none has takes no time. Static.

    **Attributes:**

    - `collapsed`: whether some class is made of several kernels.
    - `single`: whether some class is one kernel with a law of its own.
    """

    collapsed: bool = eqx.field(static=True)
    single: bool = eqx.field(static=True)


class Stalls(eqx.Module):
    """Which ops may stall: `op`, `kind` of stall, and `calls` times members, for each entry."""

    op: Int[Array, " stalls"]
    kind: Int[Array, " stalls"]
    calls: Float[Array, " stalls"]
    most: int = eqx.field(static=True)  # Of one sample.


class Structure(eqx.Module):
    """A program without its parameters and labels. All arrays are padded to buckets of shapes, and
    are arguments of what is compiled: programs of one bucket share compiled code.

    **Attributes:**

    - `lanes`: the graph of one replica.
    - `row`, `microbatch`, `group`: for each lane, the entry of `row_class`; the microbatch whose
        data it depends on, or the last for none; the group of the program's adjustment.
    - `row_class`, `row_rank`: the class, and the rank whose slowest GPU slows it, or the last for
        none.
    - `direct`, `compute`: of each class, its only kernel, or -1; whether GPUs slow it.
    - `kind`, `on_network`: of each kernel; kinds are numbered as in `all_kinds`.
    - `collapse`: what the classes are made of.
    - `reduce_scatter`, `tail`: classes, or -1.
    - `members`: how many GPUs the group of a rank has, and how many there are in all.
    - `num_ranks`, `num_replicas`: as of the program.
    - `strata`: how replica samples are divided.
    - `stalls`: `None` where nothing stalls.
    - `sequences`: for `resolution="kernel"`, else `None`.
    - `ops`, `reductions`, `last`: which laws there are among ops, reductions of gradients, and in
        the tail.
    - `num_microbatches`: how many factors of microbatches there is room for.
    - `tables`: whether some op needs the table of a law.
    """

    lanes: Lanes
    row: Int[Array, "levels width"]
    microbatch: Int[Array, "levels width"]
    group: Int[Array, "levels width"] | None
    row_class: Int[Array, " rows"]
    row_rank: Int[Array, " rows"]
    direct: Int[Array, " classes"]
    compute: Bool[Array, " classes"]
    kind: Int[Array, " kernels"]
    on_network: Bool[Array, " kernels"]
    collapse: Collapse
    reduce_scatter: Int[Array, " ranks"]
    tail: Int[Array, ""]
    members: Float[Array, "2"]
    num_ranks: UInt32[Array, ""]
    num_replicas: UInt32[Array, ""]
    strata: Strata
    stalls: Stalls | None
    sequences: Sequences | None
    ops: Mixed
    reductions: Mixed
    last: Mixed
    num_microbatches: int = eqx.field(static=True)
    tables: bool = eqx.field(static=True)

    @property
    def ranks(self) -> int:
        """How many pipeline ranks there is room for."""
        return len(self.reduce_scatter)


def structure_of(program: Program) -> Structure:
    """The structure of a program."""
    ops, rows, blocks = program.ops, program.rows, program.blocks
    lanes = to_lanes(program.levels)
    shape = lanes.ops.shape[0], lanes.width
    num_ranks = len(lanes.sinks)
    num_microbatches = bucket(program.num_microbatches, 16)
    direct, compute = blocks.direct.value, blocks.compute.value
    depends = compute[rows.class_.value][ops.row.value]
    microbatch = np.where(depends, ops.microbatch.value, num_microbatches)
    adjustment = program.adjustment
    reductions = program.reduce_scatter.value
    tail = np.array([program.tail])
    return Structure(
        lanes=lanes,
        row=in_lanes(program.levels, ops.row.value, shape),
        microbatch=in_lanes(program.levels, microbatch, shape),
        group=adjustment and in_lanes(program.levels, adjustment.group.value, shape),
        row_class=_padded(rows.class_.value, bucket(len(rows.class_.value), 32)),
        row_rank=_padded(
            np.where(rows.rank.value < 0, num_ranks, rows.rank.value),
            bucket(len(rows.rank.value), 32),
        ),
        direct=_padded(direct, bucket(len(direct), 16), -1),
        compute=_padded(compute, bucket(len(compute), 16), False),
        kind=_kinds(program),
        on_network=_padded(program.latencies.on_network.value, kernels_of(program), False),
        collapse=_collapse(program),
        reduce_scatter=_padded(reductions, num_ranks, -1),
        tail=jnp.asarray(program.tail, jnp.int32),
        members=jnp.asarray([program.group_size, program.world_size], program.latencies.mean.dtype),
        num_ranks=jnp.asarray(program.num_ranks, jnp.uint32),
        num_replicas=jnp.asarray(program.num_replicas, jnp.uint32),
        strata=strata_of(program),
        stalls=_stalls(program),
        sequences=sequences_of(program) if program.resolution == "kernel" else None,
        ops=_mixed(direct[rows.class_.value]),
        reductions=_mixed(direct[reductions[reductions >= 0]]),
        last=_mixed(direct[tail[tail >= 0]]),
        num_microbatches=num_microbatches,
        tables=_needs_tables(program),
    )


def kernels_of(program: Program) -> int:
    """How many kernels there is room for."""
    return bucket(len(program.latencies.kind.value), 64)


def ranks_of(program: Program) -> int:
    """How many pipeline ranks there is room for."""
    return bucket(program.num_ranks, 4)


def _needs_tables(program: Program) -> bool:
    """Whether some op is a single kernel whose law has no cheap closed form. Kernels that are drawn
    one by one always use tables.
    """
    table, direct = program.latencies, program.blocks.direct.value
    single = {table.kinds[kind] for kind in table.kind.value[direct[direct >= 0]]}
    laws = [program.variability.residual[kind] for kind in single]
    closed = all(law.log_sigma is not None for law in laws)
    return not closed or program.resolution == "kernel"


def _mixed(direct: np.ndarray) -> Mixed:
    return Mixed(collapsed=bool((direct < 0).any()), single=bool((direct >= 0).any()))


def _collapse(program: Program) -> Collapse:
    blocks, dtype = program.blocks, program.latencies.mean.dtype
    members = blocks.members.value
    num_segments = bucket(len(members), 32)
    num_kernels, num_classes = kernels_of(program), bucket(len(blocks.direct.value), 16)
    return Collapse(
        segments=_matrix(blocks.segments.value, (num_segments, num_kernels), dtype),
        class_segments=_matrix(blocks.class_segments.value, (num_classes, num_segments), dtype),
        class_collectives=_matrix(
            blocks.class_collectives.value, (num_classes, num_kernels), dtype
        ),
        members=_padded(members.astype(dtype), num_segments),
        # A group as large as the world is the world.
        group=_padded((members != program.group_size).astype(np.int32), num_segments),
    )


def _stalls(program: Program) -> Stalls | None:
    op, kind = program.stall_ops.value, program.stall_kinds.value
    if not len(op):
        return None
    number = bucket(len(op), 64, 4)
    return Stalls(
        op=_padded(op, number, int(op[-1])),
        kind=_padded(kind, number, int(kind[-1])),
        calls=_padded(program.stall_counts.value.astype(program.latencies.mean.dtype), number),
        most=bucket(max(stratum.stalls for stratum in program.strata), 4),
    )


def _kinds(program: Program) -> Int[Array, " kernels"]:
    """The place of each kernel's kind among all kinds that have a law."""
    place = {kind: i for i, kind in enumerate(all_kinds(program))}
    kinds = np.array([place[kind] for kind in program.latencies.kinds] or [0], np.int32)
    return _padded(kinds[program.latencies.kind.value], kernels_of(program))


def all_kinds(program: Program) -> tuple[str, ...]:
    """Kinds of kernels in a fixed order, also those that the program has none of: so that jobs with
    and without a kind share compiled code.
    """
    return tuple(sorted({*KINDS, *program.variability.residual}))


def _padded(array: np.ndarray, number: int, fill: int = 0) -> Shaped[Array, " number"]:
    array = array.astype(np.int32) if array.dtype == np.int64 else array
    return jnp.asarray(np.append(array, np.full(number - len(array), fill, array.dtype)))


def _matrix(array: np.ndarray, shape: tuple[int, int], dtype) -> Float[Array, "rows columns"]:
    whole = np.zeros(shape, dtype)
    whole[tuple(map(slice, array.shape))] = array
    return jnp.asarray(whole)
