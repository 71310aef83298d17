"""Evaluates a JAX function by NumPy: on small arrays, to compile takes far longer than to run."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from ._flat import COLUMNS, Flat, flat
from ._operations import OPERATIONS, wide


_MOST_TRACES, _MOST_CALLS = 256, 4096
_traces: dict[Any, tuple[ClosedJaxpr, Any]] = {}
_calls: dict[tuple[int, bytes], tuple[ClosedJaxpr, list[Any]]] = {}


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
    trace, leaves, of_result = traced(function, args)
    whole = flat(trace)
    with np.errstate(all="ignore"):
        values = values_of(whole, leaves)
    return on_device(values, whole, trace, of_result)


def on_device(values: list[Any], whole: Flat, trace: ClosedJaxpr, of_result: Any) -> Any:
    """What the function returns that was traced, from all its values."""
    with np.errstate(all="ignore"):
        pairs = zip(whole.outputs, trace.out_avals, strict=True)
        found = [np.asarray(values[number], out.dtype) for number, out in pairs]
    return eqx.combine(jax.tree.unflatten(of_result[0], jax.device_put(found)), of_result[1])


def traced(function: Callable[..., Any], args: Any) -> tuple[ClosedJaxpr, list[Any], Any]:
    """What JAX traces of a function, once for each structure of its arguments; its inputs, with
    real numbers in double precision; and the structure and the static leaves of what it returns.
    """
    arrays, static = eqx.partition(args, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    signature = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    of_static, static_tree = jax.tree.flatten(static)
    wide_floats = jax.config.read("jax_enable_x64")
    about = function, tree, signature, tuple(of_static), static_tree, wide_floats
    if about not in _traces:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        _traces[about] = _traced(function, static, tree, leaves)
    trace, of_result = _traces[about]
    return trace, [wide(np.asarray(x)) for x in leaves], of_result


def _traced(function, static, tree, leaves) -> tuple[ClosedJaxpr, Any]:
    """The traced function; and the structure and the static leaves of what it returns."""
    about: list[Any] = []

    def flat(*leaves):
        args = eqx.combine(jax.tree.unflatten(tree, leaves), static)
        found, static_part = eqx.partition(function(*args), eqx.is_array)
        found, of_result = jax.tree.flatten(found)
        about[:] = [of_result, static_part]
        return found

    return jax.make_jaxpr(flat)(*leaves), about


def by_columns(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a vector, of `(numbers, columns)`: at each column by itself. It should have few
    results: `vjp_on_host` takes as many passes backward as it has, however many figures.
    """

    each = jax.vmap(function, in_axes=1, out_axes=1)
    each.__name__ = COLUMNS
    return jax.jit(each)


def evaluated(function: ClosedJaxpr | Jaxpr, args: Sequence[Any]) -> list[Any]:
    """What a traced function returns."""
    whole = flat(function)
    values = values_of(whole, args)
    return [values[number] for number in whole.outputs]


def values_of(whole: Flat, args: Sequence[Any]) -> list[Any]:
    """All values of a traced function."""
    values = whole.start.copy()
    for number, x in zip(whole.inputs, args, strict=True):
        values[number] = x
    for equation, reads, writes in whole.operations:
        found = _result(equation, [values[number] for number in reads])
        for number, x in zip(writes, found, strict=True):
            values[number] = x
    return values


def _result(equation, args: list[Any]) -> list[Any]:
    """The values of one equation."""
    name, params = equation.primitive.name, equation.params
    if name in OPERATIONS:
        found = OPERATIONS[name](equation, *args)
    elif name in NESTED:
        return evaluated(params[NESTED[name]], args)
    elif name in _CONTROL:
        return _CONTROL[name](params, args)
    else:
        args = [
            x if _is_key(y.aval) else jnp.asarray(x, y.aval.dtype)
            for x, y in zip(args, equation.invars, strict=True)
        ]
        found = equation.primitive.bind(*args, **params)
        found = jax.tree.map(lambda x: x if _is_key(x) else wide(np.asarray(x)), found)
    return list(found) if equation.primitive.multiple_results else [found]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _called_once(function: ClosedJaxpr, args: list[Any]) -> list[Any]:
    """The same, remembered: programs that differ in one law have most of their segments in common,
    and each is an iteration of a loop over them.
    """
    about = hashlib.blake2b(digest_size=16)
    for x in args:
        about.update(np.ascontiguousarray(x).data)
    key = id(function), about.digest()
    if key not in _calls:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = function, evaluated(function, args)  # Kept, so that its number stays its own.
    return _calls[key][1]


# Equations that call a function of their own: under which name they have it.
NESTED = {
    "jit": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def _scan(params: dict[str, Any], args: list[Any]) -> list[Any]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    slices = args[num_consts + num_carry :]
    length = params["length"]
    each: list[Any] = [None] * length
    call = evaluated if num_carry else _called_once
    for i in reversed(range(length)) if params["reverse"] else range(length):
        found = call(params["jaxpr"], [*consts, *carry, *(x[i] for x in slices)])
        carry, each[i] = found[:num_carry], found[num_carry:]
    if not length:
        shapes = params["jaxpr"].out_avals[num_carry:]
        return [*carry, *(wide(np.zeros((0, *x.shape), x.dtype)) for x in shapes)]
    return [*carry, *(np.stack(x) for x in zip(*each, strict=True))]


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


def _cond(params: dict[str, Any], args: list[Any]) -> list[Any]:
    return evaluated(branch_of(params, args), args[1:])


def branch_of(params: dict[str, Any], args: list[Any]) -> ClosedJaxpr:
    branches = params["branches"]
    return branches[min(max(int(args[0]), 0), len(branches) - 1)]


_CONTROL: dict[str, Callable[..., list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
