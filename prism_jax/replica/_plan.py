"""Plans: all that the devices need of a program, or of a part of it."""

import dataclasses
import operator

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float

from .._padding import without_axes
from ..host import on_host, vjp_on_host
from ..op_law import (
    ClassLaw,
    Collapsed,
    Tables,
    exact_gradients,
    parameters_of,
    single_laws,
    tabulate,
)
from ..program import Program, Sinks
from ._structure import Structure, structure_of


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


def _without_contents(plan: Plan) -> Plan:
    """The plan without what only tables depend on."""
    classes = plan.structure.classes
    blocks = without_axes(classes.blocks, "segments", "kernels", "branches", "waits")
    return eqx.tree_at(
        lambda plan: plan.structure.classes,
        plan,
        dataclasses.replace(classes, blocks=blocks, loads=None, stalling=None),
    )


def _without(plan: Plan, *parts: str) -> Plan:
    """The plan with `None` for parts that it may have."""
    where = operator.attrgetter(*parts)
    return eqx.tree_at(where, plan, (None,) * len(parts), is_leaf=lambda x: x is None)


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
