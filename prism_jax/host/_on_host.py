"""Evaluates a JAX function by NumPy: on small arrays, to compile takes far longer than to run."""

import functools as ft
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ._operations import OPERATIONS, wide


_MOST_TRACES, _MOST_CALLS = 256, 1024
# Loops over larger arrays, such as all steps, are not remembered.
_LARGE = 2**13
_traces: dict[Any, tuple[ClosedJaxpr, Any, Any]] = {}
_calls: dict[tuple[Any, bytes], list[Any]] = {}
# The name that JAX has for what `by_columns` gives, which stays whole.
_COLUMNS = "columns"


@np.errstate(all="ignore")
def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with every real number in double precision until the end.

    JAX traces the function, once for each structure of its arguments, and NumPy and SciPy do what
    was traced. An operation without a counterpart in `OPERATIONS` is left to JAX. Where an argument
    is traced itself, in `jit` or by a transformation, this is `function(*args)`.

    **Arguments:**

    - `function`: must not close over arrays, and be the same object from call to call.
    - `args`: PyTrees; their leaves that are not arrays are static.

    **Returns:**

    What the function returns, of the same dtypes, as arrays on the device.
    """
    arrays = jax.tree.leaves(eqx.filter(args, eqx.is_array))
    if any(isinstance(x, Tracer) for x in arrays):
        return function(*args)
    trace = traced(function, args)
    return trace.on_device(values_of(trace.flat, trace.leaves, all_of_them=False))


class Traced(NamedTuple):
    """What JAX has traced of a function.

    **Attributes:**

    - `flat`: its operations.
    - `leaves`: its inputs, with real numbers in double precision.
    - `results`: the shape and dtype of each array that it returns, in their structure.
    - `static`: what it returns besides arrays.
    """

    flat: "Flat"
    leaves: list[np.ndarray]
    results: Any
    static: Any

    def on_device(self, values: list[Any]) -> Any:
        """What the function returns, from all its values."""
        shapes, structure = jax.tree.flatten(self.results)
        pairs = zip(self.flat.outputs, shapes, strict=True)
        found = [np.asarray(values[number], out.dtype) for number, out in pairs]
        return eqx.combine(jax.tree.unflatten(structure, jax.device_put(found)), self.static)


def traced(function: Callable[..., Any], args: Any) -> Traced:
    """What JAX traces of a function, once for each structure of its arguments."""
    arrays, static = eqx.partition(args, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    signature = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    of_static, static_tree = jax.tree.flatten(static)
    wide_floats = jax.config.read("jax_enable_x64")
    about = function, tree, signature, tuple(of_static), static_tree, wide_floats
    if about not in _traces:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        _traces[about] = eqx.filter_make_jaxpr(function)(*args)
    trace, results, rest = _traces[about]
    return Traced(flat(trace), [wide(np.asarray(x)) for x in leaves], results, rest)


def by_columns(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a vector, of `(numbers, columns)`: at each column by itself. It should have few
    results: `vjp_on_host` takes as many passes backward as it has, however many figures.
    """

    each = jax.vmap(function, in_axes=1, out_axes=1)
    each.__name__ = _COLUMNS
    return jax.jit(each)


class Operation(NamedTuple):
    """An equation, the numbers of the values that it reads and writes, and those of the values that
    neither a later one reads nor the function returns.
    """

    equation: JaxprEqn
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    last: tuple[int, ...] = ()


class Flat(NamedTuple):
    """A traced function as one list of operations without functions within functions.

    **Attributes:**

    - `inputs`, `outputs`: the numbers of the values that are its arguments and results.
    - `start`: all values, as far as they are constants.
    - `operations`: in order, without those that no result depends on.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    start: list[Any]
    operations: list[Operation]


@ft.lru_cache(maxsize=4096)
def flat(function: ClosedJaxpr | Jaxpr) -> Flat:
    """The list of a traced function's operations, made once."""
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
            touched = {*operation.reads, *operation.writes}
            kept.append(operation._replace(last=tuple(touched - used)))
            used |= touched
    return Flat(tuple(inputs), tuple(outputs), start, kept[::-1])


def _is_inlined(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return name == "remat2" or (name == "jit" and equation.params["name"] != _COLUMNS)


def evaluated(function: ClosedJaxpr | Jaxpr, args: Sequence[Any]) -> list[Any]:
    """What a traced function returns."""
    whole = flat(function)
    values = values_of(whole, args, all_of_them=False)
    return [values[number] for number in whole.outputs]


def values_of(whole: Flat, args: Sequence[Any], *, all_of_them: bool = True) -> list[Any]:
    """All values of a traced function, or only its results, in memory that is used again."""
    values = whole.start.copy()
    for number, x in zip(whole.inputs, args, strict=True):
        values[number] = x
    for equation, reads, writes, last in whole.operations:
        found = _result(equation, [values[number] for number in reads])
        for number, x in zip(writes, found, strict=True):
            values[number] = x
        if not all_of_them:
            for number in last:
                values[number] = None
    return values


def _result(equation, args: list[Any]) -> list[Any]:
    """The values of one equation."""
    name = equation.primitive.name
    if name in _LOOPS:
        return _remembered(equation, ft.partial(_LOOPS[name], equation.params), args)
    if name in _CALLS:
        return _CALLS[name](equation.params, args)
    if name in OPERATIONS:
        found = OPERATIONS[name](equation, *args)
    else:
        args = [
            x if _is_key(y.aval) else jnp.asarray(x, y.aval.dtype)
            for x, y in zip(args, equation.invars, strict=True)
        ]
        found = equation.primitive.bind(*args, **equation.params)
        found = jax.tree.map(lambda x: x if _is_key(x) else wide(np.asarray(x)), found)
    return list(found) if equation.primitive.multiple_results else [found]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _remembered(key: Any, evaluate: Callable[[list[Any]], list[Any]], args: list[Any]) -> list[Any]:
    """`evaluate(args)`, once for each key, which stands for what is evaluated: a loop, or one
    iteration of it. Programs that differ in one law have all other laws and most segments in
    common, and these are such loops and iterations.
    """
    if any(np.size(x) > _LARGE or _is_key(x) for x in args):
        return evaluate(args)
    about = hashlib.blake2b(digest_size=16)
    for x in args:
        about.update(np.ascontiguousarray(x).data)
    call = key, about.digest()
    if call not in _calls:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[call] = evaluate(args)
    return _calls[call]


def _scan(params: dict[str, Any], args: list[Any]) -> list[Any]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    slices = args[num_consts + num_carry :]
    function, length = params["jaxpr"], params["length"]
    shapes = function.out_avals[num_carry:]
    rows = [wide(np.zeros((length, *x.shape), x.dtype)) for x in shapes]
    call = ft.partial(evaluated, function)
    for i in reversed(range(length)) if params["reverse"] else range(length):
        inputs = [*consts, *carry, *(x[i] for x in slices)]
        found = call(inputs) if num_carry else _remembered(function, call, inputs)
        carry = found[:num_carry]
        for row, x in zip(rows, found[num_carry:], strict=True):
            row[i] = x
    return [*carry, *rows]


def _while(params: dict[str, Any], args: list[Any]) -> list[Any]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition = args[:of_condition]
    body, carry = args[of_condition : of_condition + of_body], args[of_condition + of_body :]
    while np.any(going := evaluated(params["cond_jaxpr"], [*condition, *carry])[0]):
        after = evaluated(params["body_jaxpr"], [*body, *carry])
        # In a batch, each loop goes on until its own end.
        carry = [
            np.where(
                np.reshape(going, np.shape(going) + (1,) * (np.ndim(y) - np.ndim(going))), y, x
            )
            for x, y in zip(carry, after, strict=True)
        ]
    return carry


def branch_of(params: dict[str, Any], args: list[Any]) -> ClosedJaxpr:
    """The function that a `cond` calls."""
    branches = params["branches"]
    return branches[min(max(int(args[0]), 0), len(branches) - 1)]


# Equations that call functions of their own.
_CALLS: dict[str, Callable[[dict[str, Any], list[Any]], list[Any]]] = {
    "cond": lambda params, args: evaluated(branch_of(params, args), args[1:]),
    "custom_jvp_call": lambda params, args: evaluated(params["call_jaxpr"], args),
    "custom_vjp_call": lambda params, args: evaluated(params["call_jaxpr"], args),
    "jit": lambda params, args: evaluated(params["jaxpr"], args),
}
_LOOPS = {"scan": _scan, "while": _while}
