"""What JAX has traced, as one list of operations without functions within functions."""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._operations import wide


# The name that JAX has for what `by_columns` gives, which stays whole.
COLUMNS = "columns"
_MOST = 4096
_flat: dict[int, tuple[Any, "Flat"]] = {}


class Operation(NamedTuple):
    """An equation, and the numbers of the values that it reads and writes."""

    equation: JaxprEqn
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Flat(NamedTuple):
    """A traced function.

    **Attributes:**

    - `inputs`, `outputs`: the numbers of the values that are its arguments and results.
    - `start`: all values, as far as they are constants.
    - `operations`: in order, without those that no result depends on.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    start: list[Any]
    operations: list[Operation]


def flat(function: ClosedJaxpr | Jaxpr) -> Flat:
    """The list of a traced function's operations, made once."""
    if id(function) not in _flat:
        if len(_flat) >= _MOST:
            _flat.clear()
        _flat[id(function)] = function, _made(function)  # Kept, so that its number stays its own.
    return _flat[id(function)][1]


def _made(function: ClosedJaxpr | Jaxpr) -> Flat:
    start: list[Any] = []
    operations: list[Operation] = []

    def new(value=None) -> int:
        start.append(value)
        return len(start) - 1

    def walk(function, inputs) -> list[int]:
        jaxpr = function.jaxpr if isinstance(function, ClosedJaxpr) else function
        number = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = function.consts if isinstance(function, ClosedJaxpr) else []
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            number[var] = new(wide(np.asarray(constant)))

        def of(var):
            return new(wide(np.asarray(var.val))) if isinstance(var, Literal) else number[var]

        for equation in jaxpr.eqns:
            reads = [of(var) for var in equation.invars]
            if _is_inlined(equation):
                writes = walk(equation.params["jaxpr"], reads)
            else:
                writes = [new() for _ in equation.outvars]
                operations.append(Operation(equation, tuple(reads), tuple(writes)))
            number.update(zip(equation.outvars, writes, strict=True))
        return [of(var) for var in jaxpr.outvars]

    jaxpr = function.jaxpr if isinstance(function, ClosedJaxpr) else function
    inputs = [new() for _ in jaxpr.invars]
    outputs = walk(function, inputs)
    used, kept = {*outputs}, []
    for operation in reversed(operations):
        if not used.isdisjoint(operation.writes):
            kept.append(operation)
            used.update(operation.reads)
    return Flat(tuple(inputs), tuple(outputs), start, kept[::-1])


def _is_inlined(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return name == "remat2" or (name == "jit" and equation.params["name"] != COLUMNS)
