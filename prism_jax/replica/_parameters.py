"""The parameters of a program, padded; and the derivative with respect to them, without padding."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .._padding import bucket
from ..latency import Constant
from ..loads import Unevenness
from ..program import Program, Variability, kernel_room
from ._structure import all_kinds, ranks_of


class Parameters(eqx.Module):
    """The parameters of a program in shapes that many programs share: a mean for each kernel there
    is room for, and a law for each kind there is.
    """

    variability: Variability
    unevenness: Unevenness | None
    mean: Float[Array, " kernels"]
    loading: Float[Array, " kernels"] | None = None
    latency_factor: Float[Array, " groups"] | None = None
    spread_factor: Float[Array, " groups"] | None = None
    gpu_factor: Float[Array, " ranks"] | None = None


def parameters_of(program: Program) -> Parameters:
    """The parameters of a program, padded."""
    kernels, groups = kernel_room(program), program.adjustment and program.adjustment.latency
    room = {"mean": kernels, "loading": kernels, "gpu_factor": ranks_of(program)}
    of_groups = 0 if groups is None else bucket(len(groups), 16)
    arrays = {
        name: _grown(x, room.get(name, of_groups), fill=0 if name == "mean" else 1)
        for name, x in _arrays(program).items()
    }
    return Parameters(every_kind(program), program.loads and program.loads.unevenness, **arrays)


def _arrays(program: Program) -> dict[str, Any]:
    """The parameters of a program that are padded, by their names in `Parameters`."""
    table, adjustment = program.latencies, program.adjustment
    arrays = {"mean": table.mean}
    if table.loading is not None:
        arrays["loading"] = table.loading
    if adjustment is not None:
        arrays["latency_factor"] = adjustment.latency
        arrays["spread_factor"] = adjustment.spread
        arrays["gpu_factor"] = adjustment.gpu
    return arrays


def gradient_of(program: Program, of_parameters: Parameters) -> Program:
    """The derivative with respect to the program from that with respect to its parameters: a
    program with `None` for everything that is not a float.
    """
    parameters, laws = eqx.filter(program, eqx.is_inexact_array), of_parameters.variability
    arrays = {
        name: getattr(of_parameters, name)[: len(x)] for name, x in _arrays(parameters).items()
    }
    residual = {kind: laws.residual[kind] for kind in parameters.variability.residual}
    parts = [*arrays.values(), dataclasses.replace(laws, residual=residual)]

    def places(program: Program):
        return [*_arrays(program).values(), program.variability]

    parameters = eqx.tree_at(places, parameters, jax.tree.map(jnp.asarray, parts))
    if parameters.loads is None:
        return parameters
    unevenness = jax.tree.map(jnp.asarray, of_parameters.unevenness)
    return eqx.tree_at(lambda program: program.loads.unevenness, parameters, unevenness)


def every_kind(program: Program) -> Variability:
    """The laws of a program, with one for each of `all_kinds`."""
    constant = Constant(np.ones((), program.latencies.mean.dtype))
    laws = program.variability.residual
    residual = {kind: laws.get(kind, constant) for kind in all_kinds(program)}
    return dataclasses.replace(program.variability, residual=residual)


def _grown(x: Float[Array, " n"], number: int, fill: float = 1) -> Float[Array, " number"]:
    """An array with padding; by NumPy where values are known, for JAX would compile it."""
    padding = number - len(x)
    if isinstance(x, Tracer):
        return jnp.concatenate([x, jnp.full((padding,), fill, x.dtype)])
    return jax.device_put(np.append(np.asarray(x), np.full(padding, fill, x.dtype)))
