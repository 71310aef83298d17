"""The structure of a program, without the values of its parameters, as index arrays."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..collapse import Collapse
from ..latency import log_sigma
from ..loads import Loads
from ..maxplus import Lanes, bucket, in_lanes, padded, to_lanes
from ..program import KINDS, Program, Sets, classes_of, collapse_of, groups_of, kernel_room
from ._rare import Strata, strata_columns, strata_of


class Mixed(eqx.Module):
    """The kinds of law among some classes. Kinds that do not occur cost nothing. Static.

    **Attributes:**

    - `collapsed`: whether some class has several kernels.
    - `single`: whether some class is one kernel with a law of its own.
    """

    collapsed: bool = eqx.field(static=True)
    single: bool = eqx.field(static=True)


class Classes(eqx.Module):
    """The arrays that the tables of a plan depend on: those of the classes of ops, without the
    graph.

    **Attributes:**

    - `direct`, `compute`: for each class, its only kernel, or -1; and whether factors of GPUs act
        on it.
    - `kind`, `on_network`: for each kernel, its kind, numbered as in `all_kinds`; and whether the
        network's regime acts on it.
    - `collapse`: the contents of the classes; `None` if each is one kernel.
    - `members`, `worker`: groups of GPUs, as of `groups_of`.
    - `loads`: the loads of members of expert-parallel groups; `None` if they are equal.
    - `stall_kind`, `stall_class`, `stall_calls`: the kind, the class of ops and the calls of each
        entry of `Graph.stall_op`.
    - `most_stalls`: the largest number of stalls of any stratum.
    - `tables`: whether some op needs the table of a law.
    - `stall_counts`: how many stalls of a sample there is room for.
    """

    direct: Int[Array, " classes"]
    compute: Bool[Array, " classes"]
    kind: Int[Array, " kernels"]
    on_network: Bool[Array, " kernels"]
    collapse: Collapse | None
    members: Float[Array, "3 groups"]
    worker: Float[Array, ""] | None
    loads: Loads | None
    stall_kind: Int[Array, " stalls"] | None
    stall_class: Int[Array, " stalls"] | None
    stall_calls: Float[Array, " stalls"] | None
    most_stalls: Int[Array, ""]
    tables: bool = eqx.field(static=True)
    stall_counts: int = eqx.field(static=True)


class Graph(eqx.Module):
    """The ops of one replica.

    **Attributes:**

    - `lanes`: the dependencies between ops.
    - `row`, `microbatch`, `group`: for each lane, the entry of `row_class`; the microbatch whose
        data it depends on, or the last for none; and the group of the program's adjustment.
    - `load`: for each lane, which loads its op has: those of its stage and microbatch, or the last
        for none; `None` where loads are equal.
    - `load_class`: a class of ops that has these loads.
    - `row_class`, `row_rank`: the class, and the rank whose slowest GPU it waits for, or the last
        for none.
    - `stall_op`: the ops that may stall, with one entry for each of their kinds of stall; `None` if
        no op may.
    - `mixed`: the kinds of law that occur.
    - `num_microbatches`: how many factors of microbatches there is room for.
    - `set_length`: how many of them are drawn together if they are sets, else zero.
    """

    lanes: Lanes
    row: Int[Array, "levels width"]
    microbatch: Int[Array, "levels width"]
    group: Int[Array, "levels width"] | None
    load: Int[Array, "levels width"] | None
    load_class: Int[Array, " pairs"] | None
    row_class: Int[Array, " rows"]
    row_rank: Int[Array, " rows"]
    stall_op: Int[Array, " stalls"] | None
    mixed: Mixed
    num_microbatches: int = eqx.field(static=True)
    set_length: int = eqx.field(static=True)


class Sinks(eqx.Module):
    """What the replicas reduce together; see `program.Sinks`. Padding has a rank of its own.

    **Attributes:**

    - `reduction`: the classes of reductions, or -1.
    - `first`: the first sink of the same rank.
    - `is_last`: whether a sink is the last of its rank.
    - `contention`: the part of its own latency that a reduction adds to the compute that it
        overlaps.
    - `number`: the number of sinks.
    """

    reduction: Int[Array, " sinks"]
    first: Int[Array, " sinks"]
    is_last: Bool[Array, " sinks"]
    contention: Float[Array, ""]
    number: UInt32[Array, ""]


class Structure(eqx.Module):
    """A program without its parameters and labels. All arrays are padded to buckets of shapes, and
    are arguments of compiled functions, so that programs of one bucket share compiled code.

    **Attributes:**

    - `graph`: the ops of one replica.
    - `classes`: the arrays that tables depend on.
    - `sinks`: what the replicas reduce, and when.
    - `tail`: the class of the tail, or -1.
    - `ranks`: how many pipeline ranks there is room for.
    - `num_replicas`: as in the program.
    - `strata`: how replica samples are divided.
    - `reduced`: whether gradients are reduced at all.
    - `last`: the kinds of law of the tail.
    """

    graph: Graph
    classes: Classes
    sinks: Sinks
    tail: Int[Array, ""]
    ranks: int = eqx.field(static=True)
    num_replicas: UInt32[Array, ""]
    strata: Strata
    reduced: bool = eqx.field(static=True)
    last: Mixed


def structure_of(program: Program) -> Structure:
    """The structure of a program."""
    direct, tail = program.blocks.direct.value, np.array([program.tail])
    return Structure(
        graph=_graph(program),
        classes=_classes(program),
        sinks=_sinks(program),
        tail=jax.device_put(np.int32(program.tail)),
        ranks=ranks_of(program),
        num_replicas=jax.device_put(np.uint32(program.num_replicas)),
        strata=strata_of(program),
        reduced=bool((program.sinks.reduction.value >= 0).any()),
        last=_mixed(direct[tail[tail >= 0]]),
    )


def _sinks(program: Program) -> Sinks:
    sinks, room = program.sinks, _sinks_of(program)
    first = np.searchsorted(sinks.rank.value, sinks.rank.value)
    is_last = np.zeros(sinks.number, bool)
    is_last[sinks.last] = True
    return Sinks(
        reduction=padded(sinks.reduction.value, room, -1),
        first=padded(first, room),
        is_last=padded(is_last, room, True),
        contention=jax.device_put(np.asarray(sinks.contention, program.latencies.mean.dtype)),
        number=jax.device_put(np.uint32(sinks.number)),
    )


def _graph(program: Program) -> Graph:
    ops, rows, blocks = program.ops, program.rows, program.blocks
    num_ranks = ranks_of(program)
    lanes = to_lanes(program.levels, _sinks_of(program))
    shape = lanes.ops.shape[0], lanes.width
    # Where the data of a microbatch make no difference, nothing is drawn for it.
    least_microbatches = 256 if program.variability.microbatch is None else 64
    num_microbatches = bucket(program.num_microbatches, least_microbatches)
    depends = blocks.compute.value[rows.class_.value][ops.row.value]
    microbatch = np.where(depends, ops.microbatch.value, num_microbatches)
    adjustment, sets = program.adjustment, program.variability.microbatch
    stalls = program.stall_ops.value
    load, load_class = load_numbers(program)
    pairs = bucket(len(load_class), 64) if len(load_class) else 0
    load = np.where(load < 0, pairs, load)
    return Graph(
        lanes=lanes,
        row=in_lanes(program.levels, ops.row.value, shape),
        microbatch=in_lanes(program.levels, microbatch, shape),
        group=adjustment and in_lanes(program.levels, adjustment.group.value, shape),
        load=in_lanes(program.levels, load, shape) if pairs else None,
        load_class=padded(load_class, pairs) if pairs else None,
        row_class=padded(rows.class_.value, bucket(len(rows.class_.value), 64)),
        row_rank=padded(
            np.where(rows.rank.value < 0, num_ranks, rows.rank.value),
            bucket(len(rows.rank.value), 64),
        ),
        stall_op=padded(stalls, bucket(len(stalls), 64, 4), stalls[-1]) if len(stalls) else None,
        mixed=_mixed(blocks.direct.value[rows.class_.value]),
        num_microbatches=num_microbatches,
        set_length=sets.length if isinstance(sets, Sets) else 0,
    )


def _classes(program: Program) -> Classes:
    blocks, table = program.blocks, program.latencies
    number, dtype = classes_of(program), table.mean.dtype
    kind, calls = program.stall_kinds.value, program.stall_counts.value.astype(dtype)
    room = bucket(len(kind), 64, 4)
    stalls = bool(len(kind))
    class_ = program.rows.class_.value[program.ops.row.value][program.stall_ops.value]
    members, worker = groups_of(program)
    most = int(strata_columns(program)[1].max())
    return Classes(
        direct=padded(blocks.direct.value, number, -1),
        compute=padded(blocks.compute.value, number, False),
        kind=_kinds(program),
        on_network=padded(table.on_network.value, kernel_room(program), False),
        collapse=collapse_of(program),
        members=members,
        worker=worker,
        loads=program.loads and program.loads.laws(dtype),
        stall_kind=padded(kind, room, int(kind[-1])) if stalls else None,
        stall_class=padded(class_, room) if stalls else None,
        stall_calls=padded(calls, room) if stalls else None,
        most_stalls=jax.device_put(np.int32(most)),
        tables=_needs_tables(program),
        stall_counts=bucket(most, 4) if stalls else 0,
    )


def load_numbers(program: Program) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " pairs"]]:
    """For each op, the number of its pair of stage and microbatch among those with uneven loads, or
    -1; and the class of the first op of each pair.
    """
    ops, class_ = program.ops, program.rows.class_.value[program.ops.row.value]
    pair = np.full(program.num_ops, -1)
    if program.loads is None:
        return pair, pair[:0]
    loaded = np.flatnonzero(program.loads.layers.value[class_] > 0)
    number = ops.stage.value[loaded] * program.num_microbatches + ops.microbatch.value[loaded]
    _, first, pair[loaded] = np.unique(number, return_index=True, return_inverse=True)
    return pair, class_[loaded[first]]


def ranks_of(program: Program) -> int:
    """How many pipeline ranks there is room for."""
    return bucket(program.num_ranks, 16)


def _sinks_of(program: Program) -> int:
    """How many sinks there is room for."""
    return bucket(program.sinks.number, 16)


def _needs_tables(program: Program) -> bool:
    """Whether some op is a single kernel whose law has no cheap closed form."""
    table, direct = program.latencies, program.blocks.direct.value
    kinds = np.unique(table.kind.value[direct[direct >= 0]]).tolist()
    return any(log_sigma(program.variability.residual[table.kinds[k]]) is None for k in kinds)


def _mixed(direct: np.ndarray) -> Mixed:
    return Mixed(collapsed=bool((direct < 0).any()), single=bool((direct >= 0).any()))


def _kinds(program: Program) -> Int[Array, " kernels"]:
    """The place of each kernel's kind among all kinds that have a law."""
    kinds = np.searchsorted(all_kinds(program), program.latencies.kinds or [""]).astype(np.int32)
    return padded(kinds[program.latencies.kind.value], kernel_room(program))


def all_kinds(program: Program) -> tuple[str, ...]:
    """Kinds of kernels in a fixed order, also those that the program has none of: so that jobs with
    and without a kind share compiled code.
    """
    return tuple(sorted({*KINDS, *program.variability.residual}))
