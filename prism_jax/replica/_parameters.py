"""The parameters of a program, padded; and the derivative with respect to them, without padding."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._padding import pad
from ..latency import Constant
from ..loads import Unevenness
from ..program import Adjustment, LatencyTable, Program, Variability, sizes_of
from ._structure import all_kinds


class Varied(NamedTuple):
    """The parts of a program that have parameters, without all else. A plan has a law for each kind
    that there is.
    """

    variability: Variability
    latencies: LatencyTable
    adjustment: Adjustment | None
    unevenness: Unevenness | None


def parameters_of(program: Program) -> Varied:
    """The parameters of a program, padded."""
    table, adjustment = program.latencies, program.adjustment
    sizes, dtype = sizes_of(program), table.mean.dtype
    return Varied(
        every_kind(program),
        pad(LatencyTable(table.mean, loading=table.loading), sizes, dtype),
        adjustment and pad(dataclasses.replace(adjustment, group=None), sizes, dtype),
        program.loads and program.loads.unevenness,
    )


def exact_gradients(program: Program, of_parameters: Varied) -> Program:
    """The derivatives with respect to the program from those with respect to its parameters, whose
    first axis are figures: a program with `None` for everything that is not a float.
    """

    def leaves(program: Any, unevenness: Any) -> list[Any]:
        table, adjustment = program.latencies, program.adjustment
        factors = adjustment and (adjustment.latency, adjustment.spread, adjustment.gpu)
        return jax.tree.leaves(
            (program.variability, table.mean, table.loading, factors, unevenness)
        )

    def of_program(program: Program) -> list[Any]:
        return leaves(program, program.loads and program.loads.unevenness)

    residual = {k: of_parameters.variability.residual[k] for k in program.variability.residual}
    laws = dataclasses.replace(of_parameters.variability, residual=residual)
    derivatives = leaves(of_parameters._replace(variability=laws), of_parameters.unevenness)
    parameters = eqx.filter(program, eqx.is_inexact_array)
    pairs = zip(derivatives, of_program(parameters), strict=True)
    exact = [jnp.asarray(x[:, *map(slice, like.shape)]) for x, like in pairs]
    return eqx.tree_at(of_program, parameters, exact)


def every_kind(program: Program) -> Variability:
    """The laws of a program, with one for each of `all_kinds`."""
    constant = Constant(np.ones((), program.latencies.mean.dtype))
    laws = program.variability.residual
    residual = {kind: laws.get(kind, constant) for kind in all_kinds(program)}
    return dataclasses.replace(program.variability, residual=residual)
