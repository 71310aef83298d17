"""What NumPy and SciPy do for the operations of JAX: each takes an equation and the values of its
arguments. Real numbers are in double precision, whatever the equation says.
"""

import functools as ft
import operator
import string
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax
from scipy import special


def wide(x: Any) -> np.ndarray:
    """Real numbers in double precision, and anything else as it is."""
    x = np.asarray(x)
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


def in_double_precision(args: Any) -> Any:
    """Arguments with real numbers in double precision, unless JAX is set to it: then they have the
    precision that they were given on purpose.
    """
    if jax.config.read("jax_enable_x64"):
        return args
    return jax.tree.map(lambda x: wide(x) if eqx.is_array(x) else x, args)


def _exact(equation, number: int, x) -> np.ndarray:
    """An argument of the dtype that the equation gives it."""
    return np.asarray(x, equation.invars[number].aval.dtype)


def _shape(equation) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


def _divide(equation, x, y):
    if np.issubdtype(x.dtype, np.integer):  # Rounds towards zero.
        return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(np.where(y == 0, 1, y)))
    return x / y


def _convert(equation, x, *_):
    return wide(np.asarray(x).astype(equation.params["new_dtype"]))


def _bitcast(equation, x):
    return wide(_exact(equation, 0, x).view(equation.params["new_dtype"]))


def _along(x, axes, ndim: int) -> np.ndarray:
    """An array with its axes at these of so many, along all others of which it has one entry."""
    shape = [1] * ndim
    for axis, size in zip(axes, np.shape(x), strict=True):
        shape[axis] = size
    return np.reshape(x, shape)


def _broadcast(equation, x, *_):
    shape = _shape(equation)
    return np.broadcast_to(_along(x, equation.params["broadcast_dimensions"], len(shape)), shape)


def _reshape(equation, x):
    return np.reshape(x, _shape(equation))


def _iota(equation, *_):
    shape, axis = _shape(equation), equation.params["dimension"]
    along = np.arange(shape[axis], dtype=equation.params["dtype"])
    numbers = np.broadcast_to(along, (*np.delete(shape, axis), shape[axis]))
    return wide(np.moveaxis(numbers, -1, axis))


def _select(equation, number, *cases):
    if len(cases) == 2:
        return np.where(number, cases[1], cases[0])
    return np.choose(number, cases)


def _slice(equation, x):
    params = equation.params
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _dynamic_slice(equation, x, *starts):
    sizes = equation.params["slice_sizes"]
    starts = [min(max(int(i), 0), n - k) for i, n, k in zip(starts, x.shape, sizes, strict=True)]
    return x[tuple(slice(i, i + k) for i, k in zip(starts, sizes, strict=True))]


def _pad(equation, x, fill):
    config = equation.params["padding_config"]
    apart = [n + max(n - 1, 0) * gap for n, (_, _, gap) in zip(x.shape, config, strict=True)]
    spread = np.full(apart, fill)
    spread[tuple(slice(None, None, gap + 1) for _, _, gap in config)] = x
    pairs = zip(apart, config, strict=True)  # Less than zero cuts.
    kept = tuple(slice(max(-low, 0), n + min(high, 0)) for n, (low, high, _) in pairs)
    edges = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    return np.pad(spread[kept], edges, constant_values=fill)


def dot_names(equation, ndim_x: int, ndim_y: int) -> tuple[str, str, str]:
    """The letters that `einsum` has for the axes of both arguments and of the result."""
    (of_x, of_y), (batch_x, batch_y) = equation.params["dimension_numbers"]
    names_x = string.ascii_lowercase[:ndim_x]
    names_y = [*string.ascii_lowercase[ndim_x : ndim_x + ndim_y]]
    for i, j in zip((*of_x, *batch_x), (*of_y, *batch_y), strict=True):
        names_y[j] = names_x[i]
    common = [names_x[i] for i in (*batch_x, *of_x)]
    free = [name for name in (*names_x, *names_y) if name not in common]
    return names_x, "".join(names_y), "".join([*common[: len(batch_x)], *free])


def _dot(equation, x, y):
    return np.einsum("{},{}->{}".format(*dot_names(equation, x.ndim, y.ndim)), x, y)


def _cumsum(equation, x):
    axis = equation.params["axis"]
    if equation.params["reverse"]:
        return np.flip(np.cumsum(np.flip(x, axis), axis=axis), axis)
    return np.cumsum(x, axis=axis)


def _reduce_precision(equation, x):
    bits = equation.params["mantissa_bits"]
    if equation.params["exponent_bits"] < 8:  # Less than single precision has: left to JAX.
        raise NotImplementedError
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


def _polynomial(x, *coefficients):
    """By Horner's rule; the constant comes first."""
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = coefficient + x * total
    return total


def _split(equation, x):
    params = equation.params
    return np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _places(shape, windows, indices, dimensions) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The place in an array of each element of a gathered or scattered one, and whether there is
    such a place.

    **Arguments:**

    - `windows`: how much of each axis of the array a window takes.
    - `dimensions`: JAX's numbers of dimensions: the axes of the result that lie in windows; those
        of the array that windows lack; those that indices count; and batched axes of the array and
        of the indices.
    """
    in_windows, lacking, counted, batched, batched_indices = dimensions
    lacking = {*lacking, *batched}
    batch = indices.shape[:-1]
    ndim = len(batch) + len(in_windows)
    in_batch = [i for i in range(ndim) if i not in in_windows]

    axes = iter(in_windows)
    places, valid = [], np.ones((1,) * ndim, bool)
    for axis, size in enumerate(shape):
        start = np.zeros((1,) * ndim, np.int64)
        if axis in counted:
            start = indices[..., counted.index(axis)].astype(np.int64)
            start = _along(start, in_batch, ndim)
            valid = valid & (start >= 0) & (start <= size - windows[axis])
            start = np.clip(start, 0, size - windows[axis])
        elif axis in batched:
            of_indices = batched_indices[batched.index(axis)]
            start = _along(np.arange(size), [in_batch[of_indices]], ndim)
        if axis not in lacking:
            start = start + _along(np.arange(windows[axis]), [next(axes)], ndim)
        places.append(start)
    return tuple(places), valid


def _gather(equation, x, indices):
    params = equation.params
    places, valid = _places(x.shape, params["slice_sizes"], indices, params["dimension_numbers"])
    gathered = np.broadcast_to(x[places], _shape(equation))
    if valid.all() or "FILL" not in str(params["mode"]):
        return gathered
    fill = params["fill_value"]
    if fill is None:
        real = np.issubdtype(x.dtype, np.inexact)
        fill = np.nan if real else np.iinfo(x.dtype).min if x.dtype.kind == "i" else 0
    return np.where(valid, gathered, fill)


def _scatter(put: Callable[..., None]) -> Callable[..., Any]:
    """Puts updates into a copy of an array; those without a place are left out."""

    def scattered(equation, x, indices, updates):
        dimensions = equation.params["dimension_numbers"]
        lacking = {*dimensions.inserted_window_dims, *dimensions.operand_batching_dims}
        sizes = iter(updates.shape[i] for i in dimensions.update_window_dims)
        windows = [1 if axis in lacking else next(sizes) for axis in range(x.ndim)]
        places, valid = _places(x.shape, windows, indices, dimensions)
        places = np.broadcast_arrays(*places, updates)[:-1]
        if not valid.all() and "CLIP" not in str(equation.params["mode"]):
            valid = np.broadcast_to(valid, updates.shape)
            places, updates = [place[valid] for place in places], updates[valid]
        x = np.array(x)
        put(x, tuple(places), updates)
        return x

    return scattered


def _add_at(x: np.ndarray, places: tuple[np.ndarray, ...], updates: np.ndarray) -> None:
    """`np.add.at`, several times faster."""
    flat = np.ravel_multi_index(places, x.shape).reshape(-1)
    added = np.bincount(flat, updates.reshape(-1), x.size).reshape(x.shape)
    x += added.astype(x.dtype)


def _round(equation, x):
    even = equation.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return np.round(x) if even else np.sign(x) * np.floor(np.abs(x) + 0.5)


def _power(x, n: int):
    return np.square(x) if n == 2 else x * x * x if n == 3 else x**n  # NumPy's cubes are slow.


# Operations that need nothing but their arguments: those of one name in NumPy, and others.
_SAME_NAMES = (
    "abs",
    "add",
    "cbrt",
    "cos",
    "exp",
    "expm1",
    "floor",
    "log",
    "log1p",
    "sign",
    "sin",
    "sqrt",
    "square",
)
_PLAIN: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_NAMES},
    "add_any": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "digamma": special.digamma,
    "eq": np.equal,
    "erf": special.erf,
    "erf_inv": special.erfinv,
    "erfc": special.erfc,
    "ge": np.greater_equal,
    "gt": np.greater,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lgamma": special.gammaln,
    "lt": np.less,
    "lt_to": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "polynomial": _polynomial,
    "pow": np.power,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": np.right_shift,  # Of unsigned numbers, which these are.
    "stop_gradient": np.asarray,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda equation, *args: function(*args)


def _with(parameter: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes its arguments and one parameter."""
    return lambda equation, *args: function(*args, equation.params[parameter])


def _joined(parameter: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes all of its arguments together, and an axis."""
    return lambda equation, *args: function(args, equation.params[parameter])


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _plain(function) for name, function in _PLAIN.items()},
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": _joined("dimension", np.concatenate),
    "convert_element_type": _convert,
    "cumsum": _cumsum,
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "empty2": lambda equation: wide(np.zeros(_shape(equation), equation.outvars[0].aval.dtype)),
    "gather": _gather,
    "integer_pow": _with("y", _power),
    "iota": _iota,
    "optimization_barrier": lambda equation, *x: x,
    "pad": _pad,
    "reduce_max": _with("axes", np.max),
    "reduce_min": _with("axes", np.min),
    "reduce_or": _with("axes", np.any),
    "reduce_precision": _reduce_precision,
    "reduce_sum": _with("axes", np.sum),
    "reshape": _reshape,
    "round": _round,
    "scatter": _scatter(operator.setitem),
    "scatter-add": _scatter(_add_at),
    "scatter-mul": _scatter(np.multiply.at),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _joined("axis", np.stack),
    "transpose": _with("permutation", np.transpose),
    "unstack": _with("axis", ft.partial(np.moveaxis, destination=0)),
}
