"""Plans: all that the devices need of a program, or of a part of it: index arrays, and tables."""

import dataclasses
import functools as ft
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, UInt32

from .._padding import AnyArray, bucket, pad, without_axes
from ..host import each_on_host, on_host, vjp_on_host
from ..maxplus import Levels, in_lanes
from ..op_law import (
    Classes,
    ClassLaw,
    Collapsed,
    Mixed,
    Tables,
    classes_of,
    exact_gradients,
    mixed_of,
    parameters_of,
    single_laws,
    tabulate,
)
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


class Plan(eqx.Module):
    """All that the devices need of a program: index arrays, and tables."""

    structure: Structure
    tables: Tables

    @property
    def dtype(self) -> jnp.dtype:
        """Of all times."""
        return self.tables.mean.dtype


def without_graph(plan: Plan) -> Plan:
    """The plan of the parts after the ops; its compiled code serves all graphs."""
    return eqx.tree_at(lambda plan: plan.structure.replica, plan, None)


def without_steps(plan: Plan) -> Plan:
    """The plan of the ops of a replica; its compiled code serves programs whose steps, or the
    contents of whose blocks, differ. No derivative goes through it.
    """
    of_steps = ("laws", "skewness", "tail_nodes", "tail_slowest", "step")
    plan = _without_contents(plan)
    return _without(plan, "structure.last", *map("tables.{}".format, of_steps))


def without_ops(plan: Plan) -> Plan:
    """The plan of the steps that replicas make; its compiled code serves all graphs, and programs
    the contents of whose blocks differ. No derivative goes through it.
    """
    structure, parts = plan.structure, ["structure.replica", "tables.laws", "tables.skewness"]
    if structure.reduced or structure.last.collapsed or structure.last.single:
        return _without(_without_contents(plan), *parts)
    return _without(plan, *parts, "structure.classes", "tables.residuals")


def with_tables(plan: Plan, tables: Tables) -> Plan:
    """A plan, perhaps without some parts, of a program with other tables."""

    def changed(before, after):
        return None if before is None else after

    of_plan = jax.tree.map(changed, plan.tables, tables, is_leaf=lambda x: x is None)
    return Plan(plan.structure, of_plan)


def _without_contents(plan: Plan) -> Plan:
    """The plan without what only tables depend on."""
    classes = plan.structure.classes
    blocks = without_axes(classes.blocks, "segments", "kernels", "branches", "waits")
    classes = dataclasses.replace(classes, blocks=blocks, loads=None, stalling=None)
    return eqx.tree_at(lambda plan: plan.structure.classes, plan, classes)


def _without(plan: Plan, *parts: str) -> Plan:
    """The plan with `None` for parts that it may have."""
    values_at = operator.attrgetter(*parts)
    return eqx.tree_at(values_at, plan, (None,) * len(parts), is_leaf=lambda x: x is None)


def make_plan(program: Program, structure: Structure | None = None) -> Plan:
    """Computes the tables, on the host unless the program is traced. Differentiable.

    **Arguments:**

    - `structure`: of a program that differs in its parameters only, if there is one.
    """
    if isinstance(program.levels.ops, Tracer):
        raise ValueError(
            "The whole numbers of a program cannot be traced; give a function its parameters, of "
            "`eqx.partition(program, eqx.is_inexact_array)`, and combine them with the rest in it."
        )
    structure = structure_of(program) if structure is None else structure
    return Plan(structure, on_host(tabulate, structure.classes, parameters_of(program)))


def tables_of_each(programs: Program, first: Program, number: int, structure: Structure) -> Tables:
    """The tables of several programs of one structure, which are their first axis.

    **Arguments:**

    - `programs`: the first of them, but those parameters in which they differ have all programs as
        their first axis.
    """
    args = [(structure.classes, parameters_of(program)) for program in (programs, first)]
    of_all, of_first = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in args)
    is_several = [x.ndim > y.ndim for x, y in zip(of_all, of_first, strict=True)]
    return each_on_host(tabulate, number, is_several, *args[0])


def gradients_of(program: Program, of_tables: Tables) -> Program:
    """The derivatives of figures with respect to a program's parameters, from those with respect to
    its tables, whose first axis are the figures: a program with this axis before all others, and
    with `None` for everything that is not a float.
    """
    classes = structure_of(program).classes
    _, backward = vjp_on_host(tabulate, classes, parameters_of(program))
    return exact_gradients(program, backward(of_tables))


def reduction_laws(plan: Plan) -> ClassLaw:
    """The law of the gradient reduction of each sink, `(sinks, regimes)`; without a meaning where
    there is none. GPUs make no difference to communication.
    """
    classes, tables = plan.structure.sinks.reduction, plan.tables
    # Of a class that is one kernel the first is zero, of others the second.
    collapsed = Collapsed(*tables.moments[:, classes][..., 0])
    single = single_laws(plan.structure.classes, tables, classes, tables.mean[classes])
    return ClassLaw(collapsed, single)


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


def structure_of(program: Program) -> Structure:
    """The structure of a program, padded."""
    direct, tail = program.blocks.direct, np.array([program.tail])
    regime, stalls, share = strata_columns(program)
    bounds = np.minimum(np.cumsum(share) * 2.0**32, 2.0**32 - 1).astype(np.uint32)
    bounds[-1] = 2**32 - 1
    structure = Structure(
        replica=_replica(program),
        classes=classes_of(program),
        sinks=program.sinks,
        tail=program.tail,
        ranks=sizes_of(program)["ranks"],
        num_replicas=program.num_replicas,
        strata=Strata(bounds, regime, stalls, len(share)),
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


def stratum_of(strata: Strata, sample_ids: UInt32[Array, " samples"]) -> Int[Array, " samples"]:
    """The number of each sample's stratum.

    Strata are dealt out along a Weyl sequence, so any run of consecutive ids has each in
    proportion to its share.
    """
    sequence = sample_ids * np.uint32(0x9E3779B9)
    stratum = jnp.sum(sequence[None, :] >= strata.bounds[:, None], axis=0, dtype=jnp.int32)
    return jnp.minimum(stratum, strata.number - 1)
