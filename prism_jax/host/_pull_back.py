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

from ._equations import (
    BranchCall,
    ClosedJaxpr,
    Columns,
    Function,
    JaxprEqn,
    Scan,
    function_of,
    is_known,
)
from ._on_host import Flat, Operation, branch_of, evaluated, flat, traced, values_by_jax, values_of
from ._operations import in_double_precision
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
    trace = traced(function, *jax.tree.flatten(args))
    try:
        values = values_of(flat(trace.function), trace.leaves)
        results = [*map(values.__getitem__, flat(trace.function).outputs)]
    except Exception:  # JAX repeats an error that is the function's own.
        values, results = None, values_by_jax(function, args)
    arrays, structure = jax.tree.flatten(eqx.filter(args[-1], eqx.is_array))
    passive = len(trace.leaves) - len(arrays)
    active = [False] * passive + [_is_real(x) for x in arrays]

    @np.errstate(all="ignore")
    def backward(of_outs: Any) -> Any:
        pairs = zip(jax.tree.leaves(of_outs), jax.tree.leaves(trace.results), strict=True)
        of_results = [
            np.asarray(array, np.float64) if _is_real(out) else None for array, out in pairs
        ]
        zeros = np.zeros(next(len(array) for array in of_results if array is not None))
        derivatives = None
        if values is not None:
            with contextlib.suppress(Exception):  # JAX repeats an error that is the function's own.
                derivatives = _back(flat(trace.function), values, of_results, active)[passive:]
        if derivatives is None:
            derivatives = _derivatives_by_jax(function, args, of_results)
        derivatives = [
            np.multiply.outer(zeros, array) if derivative is None else derivative
            for array, derivative in zip(arrays, derivatives, strict=True)
        ]
        pairs = zip(arrays, derivatives, strict=True)
        of_arrays = [
            derivative.astype(array.dtype) if _is_real(array) else None
            for array, derivative in pairs
        ]
        return jax.tree.unflatten(structure, of_arrays)

    return trace.on_device(results), backward


def _derivatives_by_jax(
    function: Callable[..., Any], args: Any, of_results: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    """By JAX, the derivatives of figures with respect to the arrays in the last argument, in their
    order, from those with respect to the arrays that the function returns; `None` stands for those
    that are not real numbers.
    """
    *earlier, last = in_double_precision(args)
    with jax.enable_x64(True):
        real, fixed = eqx.partition(last, eqx.is_inexact_array)
        cotangents = [None if x is None else jnp.asarray(x) for x in of_results]

        @eqx.filter_jit
        def back(real, fixed, earlier, cotangents):
            def real_results(real):
                arrays = eqx.filter(function(*earlier, eqx.combine(real, fixed)), eqx.is_array)
                pairs = zip(jax.tree.leaves(arrays), cotangents, strict=True)
                return [x for x, of_x in pairs if of_x is not None]

            values, pull_back = jax.vjp(real_results, real)
            of_values = [x for x in cotangents if x is not None]
            pairs = zip(of_values, values, strict=True)
            return jax.vmap(pull_back)([of_x.astype(x.dtype) for of_x, x in pairs])[0]

        derivatives = jax.tree.leaves(back(real, fixed, earlier, cotangents))
    of_reals = iter(derivatives)
    arrays = jax.tree.leaves(eqx.filter(last, eqx.is_array))
    return [np.asarray(next(of_reals)) if eqx.is_inexact_array(x) else None for x in arrays]


def _is_real(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _has_derivatives(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)  # Complex numbers within a function, too.


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
    flattened = flat(function)
    read = {number for operation in flattened.operations for number in operation.reads}
    kept = [
        operation
        for operation in flattened.operations
        if _has_slopes(operation.equation) or read & {*operation.writes}
    ]
    return flattened._replace(operations=kept)


def _has_slopes(equation: JaxprEqn) -> bool:
    return equation.primitive.name in SLOPES and is_known(equation)


def _back(
    flattened: Flat,
    values: Sequence[Any],
    of_results: Sequence[np.ndarray | None],
    active: Sequence[bool],
) -> list[np.ndarray | None]:
    """The same, where all values are known."""
    depends = {number for number, use in zip(flattened.inputs, active, strict=True) if use}
    for operation in flattened.operations:
        if not depends.isdisjoint(operation.reads):
            pairs = zip(operation.writes, operation.equation.outvars, strict=True)
            depends.update(number for number, var in pairs if _has_derivatives(var.aval))
    sums: dict[int, np.ndarray] = {}

    def add(numbers, derivatives):
        for number, derivative in zip(numbers, derivatives, strict=True):
            if derivative is not None and number in depends:
                sums[number] = sums[number] + derivative if number in sums else derivative

    add(flattened.outputs, of_results)
    for operation in reversed(flattened.operations):
        reads, writes = operation.reads, operation.writes
        of_outs = [sums.pop(number, None) for number in writes]
        if any(derivative is not None for derivative in of_outs):
            outs, args = ([*map(values.__getitem__, numbers)] for numbers in (writes, reads))
            wanted = [number in depends for number in reads]
            add(reads, _through(operation, of_outs, outs, args, wanted))
    return [sums.get(number) for number in flattened.inputs]


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
        case BranchCall() as call:
            return None, *_pulled_back(branch_of(call, args), args[1:], of_outs, wanted[1:])
        case Scan(num_carry=0) as loop:
            return _through_map(loop, of_outs, args, wanted)
    if not _has_slopes(equation):
        return _equation_by_jax(equation, of_outs, args, wanted)
    slopes = SLOPES[equation.primitive.name](equation, of_outs[0], outs[0], *args)
    return [slope() if use else None for slope, use in zip(slopes, wanted, strict=True)]


def _through_columns(
    function: Function, of_outs: np.ndarray, columns: np.ndarray
) -> np.ndarray | None:
    """Backward through a function of each column, by all its slopes."""
    number = of_outs.shape[1]
    unit = np.broadcast_to(np.eye(number)[:, :, None], (number, number, columns.shape[1]))
    (slopes,) = _pulled_back(function, [columns], [unit], [True])
    return None if slopes is None else np.einsum("foc,onc->fnc", of_outs, slopes)


def _through_map(loop: Scan, of_outs, args, wanted) -> list[np.ndarray | None]:
    """Backward through a loop that carries nothing from one iteration to the next."""
    number = loop.num_consts
    consts, slices = args[:number], args[number:]
    of_consts: list[Any] = [None] * number
    figures = next(len(array) for array in of_outs if array is not None)
    of_slices = [
        np.zeros((figures, *array.shape), array.dtype) if use else None
        for array, use in zip(slices, wanted[number:], strict=True)
    ]
    for i in reversed(range(loop.length)):
        of_iteration = [
            array[:, i] if array is not None and array[:, i].any() else None for array in of_outs
        ]
        if all(array is None for array in of_iteration):
            continue
        inputs = [*consts, *(array[i] for array in slices)]
        derivatives = _pulled_back(loop.function, inputs, of_iteration, wanted)
        of_consts = [
            _sum(array, derivative)
            for array, derivative in zip(of_consts, derivatives[:number], strict=True)
        ]
        for of_all, of_one in zip(of_slices, derivatives[number:], strict=True):
            if of_all is not None and of_one is not None:
                of_all[:, i] = of_one
    return [*of_consts, *of_slices]


def _sum(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    return second if first is None else first if second is None else first + second


def _equation_by_jax(equation: JaxprEqn, of_outs, args, wanted) -> list[np.ndarray | None]:
    """The same for an operation that has derivatives of its own in JAX."""
    figures = tuple(None if derivative is None else len(derivative) for derivative in of_outs)
    function = _derivative(equation, tuple(wanted), figures)
    derivatives = iter(
        evaluated(
            function, [*args, *(derivative for derivative in of_outs if derivative is not None)]
        )
    )
    return [next(derivatives) if use else None for use in wanted]


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

        def results(*changed):
            values = iter(changed)
            used = (next(values) if use else array for array, use in zip(args, wanted, strict=True))
            outs = function(*used)
            return [
                array
                for array, number_of in zip(outs, figures, strict=True)
                if number_of is not None
            ]

        changed = [array for array, use in zip(args, wanted, strict=True) if use]
        return jax.vmap(jax.vjp(results, *changed)[1])(list(of_results))

    avals: list[Any] = [array.aval for array in (*equation.invars, *equation.outvars)]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in avals[:number]]
    for array, number_of in zip(avals[number:], figures, strict=True):
        if number_of is not None:
            shapes.append(jax.ShapeDtypeStruct((number_of, *array.shape), array.dtype))
    with jax.enable_x64(True):
        return jax.make_jaxpr(of_wanted)(*shapes)
