"""Converts derivatives with respect to tables to derivatives with respect to parameters."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

from ..host import vjp_on_host
from ..program import Program
from ._plan import Parameters, Tables, parameters_of, tabulate
from ._structure import structure_of


def gradients_of(program: Program, of_tables: Tables) -> list[Program]:
    """The derivatives of figures with respect to a program's parameters, from those with respect to
    its tables, whose first axis are the figures: programs with `None` for everything that is not a
    float.
    """
    classes = structure_of(program).classes
    _, backward = vjp_on_host(tabulate, classes, parameters_of(program))
    found = backward(of_tables)
    rows = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(of_tables.mean))]
    return [_of_program(program, row) for row in rows]


def _of_program(program: Program, of_parameters: Parameters) -> Program:
    """The derivative without the padding of parameters."""
    whole, found = eqx.filter(program, eqx.is_inexact_array), of_parameters.variability
    residual = {kind: found.residual[kind] for kind in whole.variability.residual}
    adjustment, loading = whole.adjustment, of_parameters.loading
    if adjustment is not None:
        adjustment = dataclasses.replace(
            adjustment,
            latency=_cut(of_parameters.latency_factor, adjustment.latency),
            spread=_cut(of_parameters.spread_factor, adjustment.spread),
            gpu=_cut(of_parameters.gpu_factor, adjustment.gpu),
        )
    loads = whole.loads
    if loads is not None:
        unevenness = jax.tree.map(jnp.asarray, of_parameters.unevenness)
        loads = dataclasses.replace(loads, unevenness=unevenness)
    return dataclasses.replace(
        whole,
        loads=loads,
        latencies=dataclasses.replace(
            whole.latencies,
            mean=_cut(of_parameters.mean, whole.latencies.mean),
            loading=None if loading is None else _cut(loading, whole.latencies.loading),
        ),
        variability=jax.tree.map(jnp.asarray, dataclasses.replace(found, residual=residual)),
        adjustment=adjustment,
    )


def _cut(x, like):
    return jnp.asarray(x[: len(like)])
