"""Derivatives of a JAX function by NumPy, backward through what JAX has traced once.

JAX can differentiate a function before it is traced, but to trace the derivative of thousands of
operations takes seconds.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._by_jax import derivatives_by_jax, values_by_jax
from ._equations import (
    Branches,
    ClosedJaxpr,
    Columns,
    Function,
    JaxprEqn,
    Scan,
    function_of,
    is_known,
)
from ._on_host import Flat, Operation, branch_of, evaluated, flat, traced, values_of
from ._slopes import SLOPES


@np.errstate(all="ignore")
def vjp_on_host(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a function gives, and how derivatives go back through it: `jax.vjp` by NumPy, of several
    figures at once.

    **Arguments:**

    - `function`, `args`: as of `on_host`; no argument may be traced.

    **Returns:**

    `function(*args)`, and a function. That takes the derivatives of figures with respect to the
    real numbers in the result, of its structure and with an axis of figures before all others; and
    gives those with respect to the real numbers in the last of `args`, of its structure and dtypes
    and with the same axis, as NumPy arrays. `None` stands for what is not a real number.
    """
    trace = traced(function, args)
    try:
        values = values_of(flat(trace.function), trace.leaves)
        results = [values[number] for number in flat(trace.function).outputs]
    except Exception:  # JAX repeats an error that is the function's own.
        values, results = None, values_by_jax(function, args)
    arrays, structure = jax.tree.flatten(eqx.filter(args[-1], eqx.is_array))
    others = len(trace.leaves) - len(arrays)
    active = [False] * others + [_is_real(x) for x in arrays]

    @np.errstate(all="ignore")
    def backward(of_outs: Any) -> Any:
        pairs = zip(jax.tree.leaves(of_outs), jax.tree.leaves(trace.results), strict=True)
        given = [np.asarray(x, np.float64) if _is_real(out) else None for x, out in pairs]
        zeros = np.zeros(next(len(x) for x in given if x is not None))
        found = None
        if values is not None:
            with contextlib.suppress(Exception):  # JAX repeats an error that is the function's own.
                found = _back(flat(trace.function), values, given, active)[others:]
        if found is None:
            found = derivatives_by_jax(function, args, given)
        found = [
            np.multiply.outer(zeros, x) if of_x is None else of_x
            for x, of_x in zip(arrays, found, strict=True)
        ]
        pairs = zip(arrays, found, strict=True)
        every = [of_x.astype(x.dtype) if _is_real(x) else None for x, of_x in pairs]
        return jax.tree.unflatten(structure, every)

    return trace.on_device(results), backward


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _has_derivatives(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)  # Complex numbers within a function, too.


def _pulled_back(
    function: Function,
    args: Sequence[Any],
    of_results: Sequence[np.ndarray | None],
    active: Sequence[bool],
) -> list[np.ndarray | None]:
    """The derivatives with respect to those arguments that are active; `None` stands for zeros."""
    values = values_of(_read_on_the_way_back(function), args)
    return _back(flat(function), values, of_results, active)


@ft.lru_cache(maxsize=4096)
def _read_on_the_way_back(function: Function) -> Flat:
    """A traced function without calls of others whose values are only returned."""
    whole = flat(function)
    read = {number for operation in whole.operations for number in operation.reads}
    kept = [x for x in whole.operations if _has_slopes(x.equation) or read & {*x.writes}]
    return whole._replace(operations=kept)


def _has_slopes(equation: JaxprEqn) -> bool:
    return equation.primitive.name in SLOPES and is_known(equation)


def _back(
    whole: Flat,
    values: Sequence[Any],
    of_results: Sequence[np.ndarray | None],
    active: Sequence[bool],
) -> list[np.ndarray | None]:
    """The same, where all values are known."""
    depends = {number for number, use in zip(whole.inputs, active, strict=True) if use}
    for operation in whole.operations:
        if not depends.isdisjoint(operation.reads):
            pairs = zip(operation.writes, operation.equation.outvars, strict=True)
            depends.update(number for number, var in pairs if _has_derivatives(var.aval))
    found: dict[int, np.ndarray] = {}

    def add(numbers, derivatives):
        for number, x in zip(numbers, derivatives, strict=True):
            if x is not None and number in depends:
                found[number] = found[number] + x if number in found else x

    add(whole.outputs, of_results)
    for operation in reversed(whole.operations):
        reads, writes = operation.reads, operation.writes
        of_outs = [found.pop(number, None) for number in writes]
        if any(x is not None for x in of_outs):
            outs, args = [values[i] for i in writes], [values[i] for i in reads]
            wanted = [number in depends for number in reads]
            add(reads, _through(operation, of_outs, outs, args, wanted))
    return [found.get(number) for number in whole.inputs]


def _through(
    operation: Operation, of_outs: list[Any], outs: list[Any], args: list[Any], wanted: list[bool]
) -> Sequence[np.ndarray | None]:
    """The derivatives with respect to the arguments of an operation, at least the wanted ones."""
    equation = operation.equation
    match operation.call:
        case Columns(function):
            if len(of_outs[0]) > of_outs[0].shape[1]:  # More figures than results.
                return [_through_columns(function, of_outs[0], args[0])]
            return _pulled_back(function, args, of_outs, wanted)
        case Branches() as call:
            return None, *_pulled_back(branch_of(call, args), args[1:], of_outs, wanted[1:])
        case Scan(num_carry=0) as loop:
            return _through_map(loop, of_outs, args, wanted)
    if not _has_slopes(equation):
        return _by_jax(equation, of_outs, args, wanted)
    found = SLOPES[equation.primitive.name](equation, of_outs[0], outs[0], *args)
    return [one() if use else None for one, use in zip(found, wanted, strict=True)]


def _through_columns(
    function: Function, of_outs: np.ndarray, columns: np.ndarray
) -> np.ndarray | None:
    """Backward through a function of each column, by all its slopes."""
    number = of_outs.shape[1]
    each = np.broadcast_to(np.eye(number)[:, :, None], (number, number, columns.shape[1]))
    (slopes,) = _pulled_back(function, [columns], [each], [True])
    return None if slopes is None else np.einsum("foc,onc->fnc", of_outs, slopes)


def _through_map(loop: Scan, of_outs, args, wanted) -> list[np.ndarray | None]:
    """Backward through a loop that carries nothing from one iteration to the next."""
    number = loop.num_consts
    consts, slices = args[:number], args[number:]
    of_consts: list[Any] = [None] * number
    figures = next(len(x) for x in of_outs if x is not None)
    of_slices = [
        np.zeros((figures, *x.shape), x.dtype) if use else None
        for x, use in zip(slices, wanted[number:], strict=True)
    ]
    for i in reversed(range(loop.length)):
        given = [x[:, i] if x is not None and x[:, i].any() else None for x in of_outs]
        if all(x is None for x in given):
            continue
        inputs = [*consts, *(x[i] for x in slices)]
        found = _pulled_back(loop.function, inputs, given, wanted)
        of_consts = [_sum(x, y) for x, y in zip(of_consts, found[:number], strict=True)]
        for whole, one in zip(of_slices, found[number:], strict=True):
            if whole is not None and one is not None:
                whole[:, i] = one
    return [*of_consts, *of_slices]


def _sum(x: np.ndarray | None, y: np.ndarray | None) -> np.ndarray | None:
    return y if x is None else x if y is None else x + y


def _by_jax(equation: JaxprEqn, of_outs, args, wanted) -> list[np.ndarray | None]:
    """The same for an operation that has derivatives of its own in JAX."""
    figures = tuple(None if x is None else len(x) for x in of_outs)
    function = _derivative(equation, tuple(wanted), figures)
    found = iter(evaluated(function, [*args, *(x for x in of_outs if x is not None)]))
    return [next(found) if use else None for use in wanted]


@ft.lru_cache(maxsize=4096)
def _derivative(
    equation: JaxprEqn, wanted: tuple[bool, ...], figures: tuple[int | None, ...]
) -> ClosedJaxpr:
    """The derivatives with respect to the wanted arguments of an equation, as JAX traces them: from
    all arguments, and from those with respect to results, for results that have some.
    """
    function, number = function_of(equation), len(wanted)

    def of_wanted(*inputs):
        args, of_results = inputs[:number], inputs[number:]

        def results(*some):
            rest = iter(some)
            used = (next(rest) if use else x for x, use in zip(args, wanted, strict=True))
            found = function(*used)
            return [x for x, given in zip(found, figures, strict=True) if given is not None]

        some = [x for x, use in zip(args, wanted, strict=True) if use]
        return jax.vmap(jax.vjp(results, *some)[1])(list(of_results))

    every: list[Any] = [x.aval for x in (*equation.invars, *equation.outvars)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in every[:number]]
    for x, given in zip(every[number:], figures, strict=True):
        if given is not None:
            shapes.append(jax.ShapeDtypeStruct((given, *x.shape), x.dtype))
    with jax.enable_x64(True):
        return jax.make_jaxpr(of_wanted)(*shapes)
