"""The index arrays of a program, padded to a bucket of shapes: see `Structure`."""

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..collapse import Collapse, Loads
from ..maxplus import Lanes
from ._strata import Strata


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
    - `collapse`: the contents of the classes.
    - `members`: the number of GPUs in the group of a rank, and the number of all GPUs.
    - `loads`: the loads of members of expert-parallel groups; `None` if they are equal.
    - `stall_kind`, `stall_calls`: the kind and the calls of each entry of `Stalls`.
    - `most_stalls`: the largest number of stalls of any stratum.
    - `tables`: whether some op needs the table of a law.
    - `stall_counts`: how many stalls of a sample there is room for.
    """

    direct: Int[Array, " classes"]
    compute: Bool[Array, " classes"]
    kind: Int[Array, " kernels"]
    on_network: Bool[Array, " kernels"]
    collapse: Collapse
    members: Float[Array, "2"]
    loads: Loads | None
    stall_kind: Int[Array, " stalls"] | None
    stall_calls: Float[Array, " stalls"] | None
    most_stalls: Int[Array, ""]
    tables: bool = eqx.field(static=True)
    stall_counts: int = eqx.field(static=True)


class Stalls(eqx.Module):
    """The ops that may stall, with one entry for each of their kinds of stall."""

    op: Int[Array, " stalls"]
    most: int = eqx.field(static=True)  # Of one sample.


class Graph(eqx.Module):
    """The ops of one replica.

    **Attributes:**

    - `lanes`: the dependencies between ops.
    - `row`, `microbatch`, `group`: for each lane, the entry of `row_class`; the microbatch whose
        data it depends on, or the last for none; and the group of the program's adjustment.
    - `row_class`, `row_rank`: the class, and the rank whose slowest GPU it waits for, or the last
        for none.
    - `stalls`: the ops that may stall; `None` if no op may.
    - `mixed`: the kinds of law that occur.
    - `num_microbatches`: how many factors of microbatches there is room for.
    - `set_length`: how many of them are drawn together if they are sets, else zero.
    """

    lanes: Lanes
    row: Int[Array, "levels width"]
    microbatch: Int[Array, "levels width"]
    group: Int[Array, "levels width"] | None
    row_class: Int[Array, " rows"]
    row_rank: Int[Array, " rows"]
    stalls: Stalls | None
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
    - `num_ranks`, `num_replicas`: as in the program.
    - `strata`: how replica samples are divided.
    - `reduced`: whether gradients are reduced at all.
    - `last`: the kinds of law of the tail.
    """

    graph: Graph
    classes: Classes
    sinks: Sinks
    tail: Int[Array, ""]
    ranks: int = eqx.field(static=True)
    num_ranks: UInt32[Array, ""]
    num_replicas: UInt32[Array, ""]
    strata: Strata
    reduced: bool = eqx.field(static=True)
    last: Mixed
