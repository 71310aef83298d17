"""Evaluates a JAX function by NumPy: on small arrays, to compile takes far longer than to run."""

import functools as ft
import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._equations import (
    COLUMNS,
    BranchCall,
    Call,
    ClosedJaxpr,
    Columns,
    Function,
    Inlined,
    JaxprEqn,
    Literal,
    Scan,
    While,
    Whole,
    call_of,
    function_of,
    is_known,
)
from ._operations import OPERATIONS, in_double_precision, wide


_MOST_TRACES, _MOST_CALLS = 256, 1024
# The last call of so many functions is remembered.
_MOST_LAST_CALLS = 8
_MOST_CHANGES = 64
# Loops over larger arrays, such as all steps, are not remembered; of the last call, larger values
# are computed again.
_LARGE = 2**13
_traces: dict[Any, tuple[ClosedJaxpr, Any, Any]] = {}
_calls: dict[tuple[Any, bytes], list[Any]] = {}
# By the number of a function: itself, digests of the arguments, all values but large ones, and by
# what has changed which operations are done again.
_last_calls: dict[int, tuple["Flat", list[bytes], list[Any], dict[frozenset[int], Any]]] = {}


@np.errstate(all="ignore")
def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with every real number in double precision until the end.

    JAX traces the function, once for each structure of its arguments, and NumPy and SciPy do what
    was traced. An operation that they do not know is left to JAX, and so is the whole function if
    it cannot be read. Where an argument is traced itself, in `jit` or by a transformation, this is
    `function(*args)`.

    **Arguments:**

    - `function`: must not close over arrays, and be the same object from call to call.
    - `args`: PyTrees; their leaves that are not arrays are static.

    **Returns:**

    What the function returns, of the same dtypes, as arrays on the device.
    """
    arrays = jax.tree.leaves(eqx.filter(args, eqx.is_array))
    if any(isinstance(x, Tracer) for x in arrays):
        return function(*args)
    trace = traced(function, *jax.tree.flatten(args))
    try:
        digests = [*map(_digest, trace.leaves)]
        values = evaluated_anew(flat(trace.function), trace.leaves, digests)
    except Exception:  # For how JAX has written the function; JAX itself repeats any other error.
        values = values_by_jax(function, args)
    return trace.on_device(values)


@np.errstate(all="ignore")
def each_on_host(
    function: Callable[..., Any], number: int, is_several: Sequence[bool], *args: Any
) -> Any:
    """`on_host(function, *args)` for a number of arguments at once.

    **Arguments:**

    - `is_several`: for each array of `args`, whether its first axis are these arguments, or it is
        one for all.

    **Returns:**

    What the function returns; the first axis of each array are the arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [np.asarray(x) if isinstance(x, jax.Array) else x for x in leaves]
    of_arrays = iter(is_several)
    firsts = [x[0] if eqx.is_array(x) and next(of_arrays) else x for x in leaves]
    trace = traced(function, firsts, tree)
    inputs = [wide(x) for x in leaves if eqx.is_array(x)]
    digests, every = [*map(_digest, inputs)], []
    places = np.flatnonzero(is_several)
    for row in range(number):
        of_row, of_digests = [*inputs], [*digests]
        for place in places:
            of_row[place] = inputs[place][row]
            of_digests[place] = _digest(of_row[place])
        every.append(evaluated_anew(flat(trace.function), of_row, of_digests))
    return trace.on_device([*map(np.stack, zip(*every, strict=True))])


def values_by_jax(function: Callable[..., Any], args: Any) -> list[np.ndarray]:
    """The arrays that a function returns, in their order, as JAX computes them."""
    args = in_double_precision(args)
    with jax.enable_x64(True):
        results = eqx.filter_jit(function)(*args)
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(results, eqx.is_array))]


class Traced(NamedTuple):
    """What JAX has traced of a function.

    **Attributes:**

    - `function`: its operations.
    - `leaves`: its inputs, with real numbers in double precision.
    - `results`: the shape and dtype of each array that it returns, in their structure.
    - `static`: what it returns besides arrays.
    """

    function: ClosedJaxpr
    leaves: list[np.ndarray]
    results: Any
    static: Any

    def on_device(self, values: Sequence[Any]) -> Any:
        """What the function returns, from its arrays."""
        shapes, structure = jax.tree.flatten(self.results)
        arrays = [np.asarray(x, out.dtype) for x, out in zip(values, shapes, strict=True)]
        return eqx.combine(jax.tree.unflatten(structure, jax.device_put(arrays)), self.static)


def traced(function: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> Traced:
    """What JAX traces of a function, once for each structure of its arguments.

    **Arguments:**

    - `leaves`, `tree`: the arguments, as `jax.tree.flatten` gives them.
    """
    signature = tuple((x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
    # Of static arguments the types, too, for 1 equals True.
    types = tuple(map(type, signature))
    key = function, tree, signature, types, jax.config.read("jax_enable_x64")
    trace = _traces.get(key)
    if trace is None:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        args = jax.tree.unflatten(tree, leaves)
        precise = in_double_precision(args)
        try:
            with jax.enable_x64(True):
                trace = eqx.filter_make_jaxpr(function)(*precise)
        except TypeError:  # It also computes with numbers whose dtype it fixes itself.
            trace = eqx.filter_make_jaxpr(function)(*args)
        _traces[key] = trace
    return Traced(trace[0], [*map(wide, filter(eqx.is_array, leaves))], *trace[1:])


def by_columns(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a vector, of `(numbers, columns)`: at each column by itself. It should have few
    results: `vjp_on_host` takes as many passes backward as it has, however many figures.
    """

    mapped = jax.vmap(function, in_axes=1, out_axes=1)
    mapped.__name__ = COLUMNS
    return jax.jit(mapped)


class Operation(NamedTuple):
    """One operation of a traced function.

    **Attributes:**

    - `equation`, `call`: what JAX has written of it, and which functions it calls.
    - `evaluate`: its results from its arguments, by NumPy; or `None`, where it is left to JAX.
    - `reads`, `writes`: the numbers of the values that it reads and writes.
    - `last`: those of the values that neither a later one reads nor the function returns.
    """

    equation: JaxprEqn
    call: Call | None
    evaluate: Callable[[list[Any]], list[Any]] | None
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
def flat(function: Function) -> Flat:
    """The list of a traced function's operations, made once."""
    start: list[Any] = []
    operations: list[Operation] = []

    def new(values: Iterable[Any]) -> range:
        first = len(start)
        start.extend(values)
        return range(first, len(start))

    def walk(function, inputs) -> list[int]:
        constants = function.consts if isinstance(function, ClosedJaxpr) else []
        number = dict(zip(function.invars, inputs, strict=True))
        number.update(zip(function.constvars, new(map(wide, constants)), strict=True))

        def of(var) -> int:
            return new([wide(var.val)])[0] if isinstance(var, Literal) else number[var]

        for equation in function.eqns:
            reads, call = tuple(map(of, equation.invars)), call_of(equation)
            if isinstance(call, Inlined):
                writes = walk(call.function, reads)
            else:
                writes = new([None] * len(equation.outvars))
                evaluate = _evaluate(equation, call)
                operations.append(Operation(equation, call, evaluate, reads, tuple(writes)))
            number.update(zip(equation.outvars, writes, strict=True))
        return [*map(of, function.outvars)]

    inputs = new([None] * len(function.invars))
    outputs = walk(function, inputs)
    used, kept = {*outputs}, []
    for operation in reversed(operations):
        if not used.isdisjoint(operation.writes):
            touched = {*operation.reads, *operation.writes}
            kept.append(operation._replace(last=tuple(touched - used)))
            used |= touched
    return Flat(tuple(inputs), tuple(outputs), start, kept[::-1])


def evaluated(function: Function, args: Sequence[Any]) -> list[Any]:
    """What a traced function returns."""
    flattened = flat(function)
    values = values_of(flattened, args, all_of_them=False)
    return [*map(values.__getitem__, flattened.outputs)]


def values_of(flattened: Flat, args: Sequence[Any], *, all_of_them: bool = True) -> list[Any]:
    """All values of a traced function, or only its results, in memory that is used again."""
    values = flattened.start.copy()
    for number, x in zip(flattened.inputs, args, strict=True):
        values[number] = x
    for operation in flattened.operations:
        _evaluate_into(values, operation)
        if not all_of_them:
            for number in operation.last:
                values[number] = None
    return values


def _digest(x: np.ndarray) -> bytes:
    return hashlib.blake2b(x.tobytes(), digest_size=16).digest()


def evaluated_anew(flattened: Flat, args: Sequence[np.ndarray], digests: list[bytes]) -> list[Any]:
    """What a traced function returns. Only what depends on arguments that differ from those of its
    last call, by their digests, is computed: programs that differ in one law have all other tables
    in common.
    """
    no_call = flattened, [b""] * len(args), flattened.start, {}
    _, old_digests, values, dependents = _last_calls.pop(id(flattened), no_call)
    values, changed = values.copy(), set[int]()
    for number, x, digest, before in zip(flattened.inputs, args, digests, old_digests, strict=True):
        if digest != before:
            changed.add(number)
        if digest != before or values[number] is None:
            values[number] = x.copy()  # What is kept may be a view of it.
    inputs = frozenset(changed)
    if inputs not in dependents:
        if len(dependents) >= _MOST_CHANGES:
            dependents.clear()
        dependents[inputs] = _dependents(flattened, values, inputs)
    for operation in dependents[inputs]:
        _evaluate_into(values, operation)
        _forget(values, flattened, operation.last)
    results = [*map(values.__getitem__, flattened.outputs)]
    for operation in dependents[inputs]:
        _forget(values, flattened, operation.writes)
    if len(_last_calls) >= _MOST_LAST_CALLS:
        del _last_calls[next(iter(_last_calls))]  # The least recent.
    _last_calls[id(flattened)] = flattened, digests, values, dependents
    return results


def _dependents(flattened: Flat, values: list[Any], inputs: frozenset[int]) -> list[Operation]:
    """The operations that depend on some inputs, and those whose values they need but are not
    known.
    """
    changed, depends = {*inputs}, []
    for operation in flattened.operations:
        depends.append(not changed.isdisjoint(operation.reads))
        if depends[-1]:
            changed.update(operation.writes)
    known = {number for number, x in enumerate(values) if x is not None}
    needed, operations = {*flattened.outputs} - known, []
    for operation, is_changed in zip(flattened.operations[::-1], depends[::-1], strict=True):
        if is_changed or not needed.isdisjoint(operation.writes):
            operations.append(operation)
            needed |= {*operation.reads} - known
    return operations[::-1]


def _forget(values: list[Any], flattened: Flat, numbers: Sequence[int]) -> None:
    """Large values are computed again rather than kept, except for constants and results."""
    for number in numbers:
        is_kept = flattened.start[number] is not None or number in flattened.outputs
        if np.size(values[number]) > _LARGE and not is_kept:
            values[number] = None


def _evaluate_into(values: list[Any], operation: Operation) -> None:
    args, evaluate = [*map(values.__getitem__, operation.reads)], operation.evaluate
    results = _operation_by_jax(operation.equation, args) if evaluate is None else evaluate(args)
    for number, x in zip(operation.writes, results, strict=True):
        values[number] = x


def _evaluate(equation: JaxprEqn, call: Call | None) -> Callable[[list[Any]], list[Any]] | None:
    """How an operation's results come from its arguments, if NumPy can do that."""
    match call:
        case Scan() | While():
            loop = _scan if isinstance(call, Scan) else _while
            return ft.partial(_remembered, equation, ft.partial(loop, call))
        case BranchCall():
            return lambda args: evaluated(branch_of(call, args), args[1:])
        case Whole(function) | Columns(function):
            return ft.partial(evaluated, function)
    name = equation.primitive.name
    if name not in OPERATIONS or not is_known(equation):
        return None
    return ft.partial(_by_numpy, OPERATIONS[name], equation)


def _by_numpy(operation: Callable[..., Any], equation: JaxprEqn, args: list[Any]) -> list[Any]:
    results = operation(equation, *args)
    return [*results] if equation.primitive.multiple_results else [results]


def _operation_by_jax(equation: JaxprEqn, args: list[Any]) -> list[Any]:
    """What JAX makes of an operation by itself."""
    avals: list[Any] = [var.aval for var in equation.invars]
    with jax.enable_x64(True):
        pairs = zip(args, avals, strict=True)
        arrays = [x if _is_key(aval) else jnp.asarray(x, aval.dtype) for x, aval in pairs]
        results = function_of(equation)(*arrays)
    return [x if _is_key(x) else wide(x) for x in results]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _remembered(key: Any, evaluate: Callable[[list[Any]], list[Any]], args: list[Any]) -> list[Any]:
    """`evaluate(args)`, once for each key, which stands for what is evaluated: a loop, or one
    iteration of it. Programs that differ in one law have all other laws and most segments in
    common, and these are such loops and iterations.
    """
    if any(np.size(x) > _LARGE or _is_key(x) for x in args):
        return evaluate(args)
    content = hashlib.blake2b(digest_size=16)
    for x in args:
        content.update(np.ascontiguousarray(x).data)
    call = key, content.digest()
    results = _calls.get(call)
    if results is None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        results = _calls[call] = evaluate(args)
    return results


def _scan(loop: Scan, args: list[Any]) -> list[Any]:
    num_consts, num_carry = loop.num_consts, loop.num_carry
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    slices = args[num_consts + num_carry :]
    stacked: Any = loop.function.outvars[num_carry:]
    rows = [wide(np.zeros((loop.length, *x.aval.shape), x.aval.dtype)) for x in stacked]
    call = ft.partial(evaluated, loop.function)
    for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
        inputs = [*consts, *carry, *map(operator.itemgetter(i), slices)]
        results = call(inputs) if num_carry else _remembered(loop.function, call, inputs)
        carry = results[:num_carry]
        for row, x in zip(rows, results[num_carry:], strict=True):
            row[i] = x
    return [*carry, *rows]


def _while(loop: While, args: list[Any]) -> list[Any]:
    of_condition, of_body = loop.num_of_condition, loop.num_of_body
    condition = args[:of_condition]
    body, carry = args[of_condition : of_condition + of_body], args[of_condition + of_body :]
    while np.any(going := evaluated(loop.condition, [*condition, *carry])[0]):
        after = evaluated(loop.body, [*body, *carry])
        # In a batch, each loop goes on until its own end.
        carry = [
            np.where(
                np.reshape(going, np.shape(going) + (1,) * (np.ndim(y) - np.ndim(going))), y, x
            )
            for x, y in zip(carry, after, strict=True)
        ]
    return carry


def branch_of(call: BranchCall, args: list[Any]) -> Function:
    """The function that a call of one of several calls."""
    return call.functions[min(max(int(args[0]), 0), len(call.functions) - 1)]
