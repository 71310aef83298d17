"""The structure of a program, without the values of its parameters, as index arrays."""

import dataclasses
import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from .._padding import AnyArray, bucket, pad
from ..maxplus import Levels, in_lanes
from ..op_law import Classes, Mixed, classes_of, mixed_of
from ..program import Ops, Program, Rows, Sets, Sinks, sizes_of


class Replica(eqx.Module):
    """The ops of one replica.

    **Attributes:**

    - `levels`: the dependencies between ops.
    - `ops`, `rows`: what the ops are.
    - `load_class`: a class of ops that has each of the loads.
    - `stall_op`: the ops that may stall, with one entry for each of their kinds of stall; `None` if
        no op may.
    - `mixed`: the kinds of law that occur.
    - `num_microbatches`: how many factors of microbatches there is room for.
    - `set_length`: how many of them are drawn together if they are sets, else zero.
    """

    levels: Levels
    ops: Ops
    rows: Rows
    load_class: Int[AnyArray, " pairs"] | None
    stall_op: Int[AnyArray, " stalls"] | None
    mixed: Mixed
    num_microbatches: int = eqx.field(static=True)
    set_length: int = eqx.field(static=True)


class Strata(eqx.Module):
    """The strata of a program.

    **Attributes:**

    - `bounds`: where, of 2^32, the share of each ends.
    - `regime`, `stalls`: the regime and the number of stalls of each stratum.
    - `number`: how many there are; the rest is padding.
    """

    bounds: UInt32[AnyArray, " strata"] = eqx.field(metadata={"fill": 2**32 - 1})
    regime: Int[AnyArray, " strata"]
    stalls: Int[AnyArray, " strata"]
    number: int | Int[AnyArray, ""]


class Structure(eqx.Module):
    """A program without its parameters and labels. All arrays are padded to buckets of shapes, and
    are arguments of compiled functions, so that programs of one bucket share compiled code.

    **Attributes:**

    - `replica`: the ops of one.
    - `classes`: the arrays that tables depend on.
    - `sinks`: what the replicas reduce, and when.
    - `tail`: the class of the tail, or -1.
    - `ranks`: how many pipeline ranks there is room for.
    - `num_replicas`: as in the program.
    - `strata`: how replica samples are divided.
    - `reduced`: whether gradients are reduced at all.
    - `last`: the kinds of law of the tail.
    """

    replica: Replica
    classes: Classes
    sinks: Sinks
    tail: int | Int[AnyArray, ""]
    ranks: int = eqx.field(static=True)
    num_replicas: int | UInt32[AnyArray, ""]
    strata: Strata
    reduced: bool = eqx.field(static=True)
    last: Mixed


def structure_of(program: Program) -> Structure:
    """The structure of a program, padded."""
    direct, tail = program.blocks.direct, np.array([program.tail])
    structure = Structure(
        replica=_replica(program),
        classes=classes_of(program),
        sinks=program.sinks,
        tail=program.tail,
        ranks=sizes_of(program)["ranks"],
        num_replicas=program.num_replicas,
        strata=_strata(program),
        reduced=bool((program.sinks.reduction >= 0).any()),
        last=mixed_of(direct[tail[tail >= 0]]),
    )
    pairs = structure.replica.load_class
    sizes = sizes_of(program) | {"pairs": bucket(0 if pairs is None else len(pairs), 64)}
    return pad(structure, sizes, program.latencies.mean.dtype)


def _replica(program: Program) -> Replica:
    ops, rows, blocks, levels = program.ops, program.rows, program.blocks, program.levels
    # Where the data of a microbatch make no difference, nothing is drawn for it.
    least_microbatches = 256 if program.variability.microbatch is None else 64
    depends = blocks.compute[rows.class_][ops.row]
    adjustment, sets = program.adjustment, program.variability.microbatch
    load, load_class = load_numbers(program)
    of_plan = dataclasses.replace(
        ops,
        phase=(),
        microbatch=np.where(depends, ops.microbatch, -1),
        group=adjustment and adjustment.group,
        load=load if len(load_class) else None,
    )
    return Replica(
        levels=dataclasses.replace(levels, num_slots=bucket(levels.num_slots, 64)),
        ops=jax.tree.map(ft.partial(in_lanes, levels), of_plan),
        rows=rows,
        load_class=load_class if len(load_class) else None,
        stall_op=program.stall_ops if len(program.stall_ops) else None,
        mixed=mixed_of(blocks.direct[rows.class_]),
        num_microbatches=bucket(program.num_microbatches, least_microbatches),
        set_length=sets.length if isinstance(sets, Sets) else 0,
    )


def load_numbers(program: Program) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " pairs"]]:
    """For each op, the number of its pair of stage and microbatch among those with uneven loads, or
    -1; and the class of the first op of each pair.
    """
    ops, class_ = program.ops, program.rows.class_[program.ops.row]
    pair = np.full(program.num_ops, -1)
    if program.loads is None:
        return pair, pair[:0]
    loaded = np.flatnonzero(np.asarray(program.loads.layers)[class_] > 0)
    number = ops.stage[loaded] * program.num_microbatches + ops.microbatch[loaded]
    _, first, pair[loaded] = np.unique(number, return_index=True, return_inverse=True)
    return pair, class_[loaded[first]]


def strata_columns(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The regime of each stratum, its number of stalls, and its share of the samples."""
    rows = map(operator.attrgetter("regime", "stalls", "share"), program.strata)
    regime, stalls, share = map(np.array, zip(*rows, strict=True))
    return regime, stalls, share


def _strata(program: Program) -> Strata:
    """The strata of a program."""
    regime, stalls, share = strata_columns(program)
    bounds = np.minimum(np.cumsum(share) * 2.0**32, 2.0**32 - 1).astype(np.uint32)
    bounds[-1] = 2**32 - 1
    return Strata(bounds, regime, stalls, len(share))


def stratum_of(strata: Strata, sample_ids: UInt32[Array, " samples"]) -> Int[Array, " samples"]:
    """The number of each sample's stratum.

    Strata are dealt out along a Weyl sequence, so any run of consecutive ids has each in
    proportion to its share.
    """
    sequence = sample_ids * np.uint32(0x9E3779B9)
    stratum = jnp.sum(sequence[None, :] >= strata.bounds[:, None], axis=0, dtype=jnp.int32)
    return jnp.minimum(stratum, strata.number - 1)
