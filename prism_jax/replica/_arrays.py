"""The index arrays of a program, padded to a bucket of shapes: see `Structure`."""

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..maxplus import Lanes
from ..program import Collapse, Loads
from ._sequences import Sequences
from ._strata import Strata


class Mixed(eqx.Module):
    """Which kinds of law there are among some classes: what none has takes no time. Static.

    **Attributes:**

    - `collapsed`: whether some class is made of several kernels.
    - `single`: whether some class is one kernel with a law of its own.
    """

    collapsed: bool = eqx.field(static=True)
    single: bool = eqx.field(static=True)


class Classes(eqx.Module):
    """What the tables of a plan depend on: the classes of ops, and not the graph.

    **Attributes:**

    - `direct`, `compute`: of each class, its only kernel, or -1; whether GPUs slow it.
    - `kind`, `on_network`: of each kernel; kinds are numbered as in `all_kinds`.
    - `collapse`: what the classes are made of.
    - `members`: how many GPUs the group of a rank has, and how many there are in all.
    - `loads`: of members of expert-parallel groups; `None` where they are equal.
    - `stall_kind`, `stall_calls`: of each entry of `Stalls`.
    - `most_stalls`: of the stratum that has the most.
    - `tables`: whether some op needs the table of a law.
    - `apart`: whether kernels are drawn one by one.
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
    apart: bool = eqx.field(static=True)
    stall_counts: int = eqx.field(static=True)


class Stalls(eqx.Module):
    """Which ops may stall, one entry for each of their kinds of stall."""

    op: Int[Array, " stalls"]
    most: int = eqx.field(static=True)  # Of one sample.


class Graph(eqx.Module):
    """The ops of one replica.

    **Attributes:**

    - `lanes`: which op waits for which.
    - `row`, `microbatch`, `group`: for each lane, the entry of `row_class`; the microbatch whose
        data it depends on, or the last for none; the group of the program's adjustment.
    - `row_class`, `row_rank`: the class, and the rank whose slowest GPU slows it, or the last for
        none.
    - `stalls`: `None` where nothing stalls.
    - `sequences`: for `resolution="kernel"`, else `None`.
    - `mixed`: which laws there are.
    - `num_microbatches`: how many factors of microbatches there is room for.
    - `set_length`: how many of them are drawn together, where they are sets, else zero.
    """

    lanes: Lanes
    row: Int[Array, "levels width"]
    microbatch: Int[Array, "levels width"]
    group: Int[Array, "levels width"] | None
    row_class: Int[Array, " rows"]
    row_rank: Int[Array, " rows"]
    stalls: Stalls | None
    sequences: Sequences | None
    mixed: Mixed
    num_microbatches: int = eqx.field(static=True)
    set_length: int = eqx.field(static=True)


class Sinks(eqx.Module):
    """What the replicas reduce together; see `program.Sinks`. What pads them is of a rank of its
    own.

    **Attributes:**

    - `reduction`: classes, or -1.
    - `first`: the first sink of the same rank.
    - `is_last`: whether it is the last of its rank.
    - `contention`: what part of its own latency a reduction adds to the compute beside it.
    - `number`: how many there are.
    """

    reduction: Int[Array, " sinks"]
    first: Int[Array, " sinks"]
    is_last: Bool[Array, " sinks"]
    contention: Float[Array, ""]
    number: UInt32[Array, ""]


class Structure(eqx.Module):
    """A program without its parameters and labels. All arrays are padded to buckets of shapes, and
    are arguments of what is compiled: programs of one bucket share compiled code.

    **Attributes:**

    - `graph`: the ops of one replica.
    - `classes`: what the tables depend on.
    - `sinks`: what the replicas reduce, and when.
    - `tail`: a class, or -1.
    - `ranks`: how many pipeline ranks there is room for.
    - `num_ranks`, `num_replicas`: as of the program.
    - `strata`: how replica samples are divided.
    - `reductions`, `last`: which laws there are among reductions of gradients, and in the tail.
    """

    graph: Graph
    classes: Classes
    sinks: Sinks
    tail: Int[Array, ""]
    ranks: int = eqx.field(static=True)
    num_ranks: UInt32[Array, ""]
    num_replicas: UInt32[Array, ""]
    strata: Strata
    reductions: Mixed
    last: Mixed
