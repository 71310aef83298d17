"""Evaluates a JAX function by NumPy: on small arrays, to compile takes far longer than to run."""

import hashlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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
    arrays, static = eqx.partition(args, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return function(*args)
    signature = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    of_static, static_tree = jax.tree.flatten(static)
    wide_floats = jax.config.read("jax_enable_x64")
    about = function, tree, signature, tuple(of_static), static_tree, wide_floats
    if about not in _traces:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        _traces[about] = _traced(function, static, tree, leaves)
    trace, of_result = _traces[about]
    with np.errstate(all="ignore"):
        found = _evaluate(trace.jaxpr, trace.consts, [wide(np.asarray(x)) for x in leaves])
        found = [np.asarray(x, y.dtype) for x, y in zip(found, trace.out_avals, strict=True)]
    return eqx.combine(jax.tree.unflatten(of_result[0], jax.device_put(found)), of_result[1])


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


def _evaluate(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> list[Any]:
    """The values of a traced function."""
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(
        (var, wide(np.asarray(x))) for var, x in zip(jaxpr.constvars, consts, strict=True)
    )

    def value(of):
        return wide(np.asarray(of.val)) if isinstance(of, Literal) else values[of]

    for equation in jaxpr.eqns:
        found = _result(equation, [value(var) for var in equation.invars])
        values.update(zip(equation.outvars, found, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _result(equation, args: list[Any]) -> list[Any]:
    """The values of one equation."""
    name, params = equation.primitive.name, equation.params
    if name in _NESTED:
        return _called(params[_NESTED[name]], args)
    if name in _CONTROL:
        return _CONTROL[name](params, args)
    if name in OPERATIONS:
        found = OPERATIONS[name](equation, *args)
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


def _called(function: Any, args: list[Any]) -> list[Any]:
    if isinstance(function, ClosedJaxpr):
        return _evaluate(function.jaxpr, function.consts, args)
    return _evaluate(function, [], args)


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
        _calls[key] = function, _called(function, args)  # Kept, so that its number stays its own.
    return _calls[key][1]


# Equations that call a function of their own: under which name they have it.
_NESTED = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def _scan(params: dict[str, Any], args: list[Any]) -> list[Any]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]
    slices = args[num_consts + num_carry :]
    length = params["length"]
    each: list[Any] = [None] * length
    call = _called if num_carry else _called_once
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
    while np.any(going := _called(params["cond_jaxpr"], [*condition, *carry])[0]):
        after = _called(params["body_jaxpr"], [*body, *carry])
        # In a batch, each loop goes on until its own end.
        carry = [
            np.where(
                np.reshape(going, np.shape(going) + (1,) * (np.ndim(y) - np.ndim(going))), y, x
            )
            for x, y in zip(carry, after, strict=True)
        ]
    return carry


def _cond(params: dict[str, Any], args: list[Any]) -> list[Any]:
    branches = params["branches"]
    return _called(branches[min(max(int(args[0]), 0), len(branches) - 1)], args[1:])


_CONTROL: dict[str, Callable[..., list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
