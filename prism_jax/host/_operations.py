"""What NumPy and SciPy do for the operations of JAX: each takes an equation and the values of its
arguments. Real numbers are in double precision, whatever the equation says.
"""

import string
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from scipy import special

from ._places import pad_places, places_of_gather, places_of_scatter


def wide(x: np.ndarray) -> np.ndarray:
    """Real numbers in double precision, and anything else as it is."""
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


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


def _broadcast(equation, x, *_):
    shape, places = _shape(equation), equation.params["broadcast_dimensions"]
    kept = [1] * len(shape)
    for place, size in zip(places, np.shape(x), strict=True):
        kept[place] = size
    return np.broadcast_to(np.reshape(x, kept), shape)


def _iota(equation, *_):
    shape, axis = _shape(equation), equation.params["dimension"]
    along = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return wide(np.broadcast_to(along, shape).astype(equation.params["dtype"]))


def _select(equation, which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _slice(equation, x):
    params = equation.params
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _pad(equation, x, fill):
    inner, elements, kept, into = pad_places(equation, x.shape)
    spread = np.full(inner, fill)
    spread[elements] = x
    whole = np.full(_shape(equation), fill)
    whole[into] = spread[kept]
    return whole


def dot_names(equation, ndim_x: int, ndim_y: int) -> tuple[str, str, str]:
    """The letters that `einsum` has for the axes of both arguments and of the result."""
    (of_x, of_y), (batch_x, batch_y) = equation.params["dimension_numbers"]
    names_x = string.ascii_lowercase[:ndim_x]
    names_y = [*string.ascii_lowercase[ndim_x : ndim_x + ndim_y]]
    for i, j in zip((*of_x, *batch_x), (*of_y, *batch_y), strict=True):
        names_y[j] = names_x[i]
    free_x = [name for i, name in enumerate(names_x) if i not in (*of_x, *batch_x)]
    free_y = [name for j, name in enumerate(names_y) if j not in (*of_y, *batch_y)]
    batch = [names_x[i] for i in batch_x]
    return names_x, "".join(names_y), "".join([*batch, *free_x, *free_y])


def _dot(equation, x, y):
    return np.einsum("{},{}->{}".format(*dot_names(equation, x.ndim, y.ndim)), x, y)


def _reduced(by: Callable[..., Any]) -> Callable[..., Any]:
    return lambda equation, x: by(x, axis=tuple(equation.params["axes"]))


def _cumsum(equation, x):
    axis = equation.params["axis"]
    if equation.params["reverse"]:
        return np.flip(np.cumsum(np.flip(x, axis), axis=axis), axis)
    return np.cumsum(x, axis=axis)


def _split(equation, x):
    params = equation.params
    return np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _gather(equation, x, indices):
    places, valid = places_of_gather(equation, x, indices)
    found = np.broadcast_to(x[places], _shape(equation))
    if not valid.all():
        fill = equation.params["fill_value"]
        if fill is None:
            real = np.issubdtype(x.dtype, np.inexact)
            fill = np.nan if real else np.iinfo(x.dtype).min if x.dtype.kind == "i" else 0
        return np.where(valid, found, fill)
    return found


def _scattered(equation, x, indices, updates):
    """A copy of an array, the places of updates in it, and these; without those that have none."""
    places, valid = places_of_scatter(equation, x, indices, updates)
    return np.array(x), tuple(place[valid] for place in places), updates[valid]


def _scatter(equation, x, indices, updates):
    x, places, updates = _scattered(equation, x, indices, updates)
    x[places] = updates
    return x


def _scatter_add(equation, x, indices, updates):
    x, places, updates = _scattered(equation, x, indices, updates)
    np.add.at(x, places, updates)
    return x


def _round(equation, x):
    even = equation.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return np.round(x) if even else np.sign(x) * np.floor(np.abs(x) + 0.5)


def _power(x, n: int):
    return np.square(x) if n == 2 else x * x * x if n == 3 else x**n  # NumPy's cubes are slow.


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that needs nothing but its arguments."""
    return lambda equation, *args: function(*args)


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _plain(function)
        for name, function in {
            "abs": np.abs,
            "add": np.add,
            "add_any": np.add,
            "and": np.bitwise_and,
            "cbrt": np.cbrt,
            "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
            "digamma": special.digamma,
            "eq": np.equal,
            "erf": special.erf,
            "erf_inv": special.erfinv,
            "erfc": special.erfc,
            "exp": np.exp,
            "expm1": np.expm1,
            "floor": np.floor,
            "ge": np.greater_equal,
            "gt": np.greater,
            "igamma": special.gammainc,
            "igammac": special.gammaincc,
            "is_finite": np.isfinite,
            "le": np.less_equal,
            "lgamma": special.gammaln,
            "log": np.log,
            "log1p": np.log1p,
            "lt": np.less,
            "lt_to": np.less,
            "max": np.maximum,
            "min": np.minimum,
            "mul": np.multiply,
            "ne": np.not_equal,
            "neg": np.negative,
            "not": np.invert,
            "or": np.bitwise_or,
            "pow": np.power,
            "shift_left": np.left_shift,
            "shift_right_arithmetic": np.right_shift,
            "shift_right_logical": np.right_shift,  # Of unsigned numbers, which these are.
            "sign": np.sign,
            "sqrt": np.sqrt,
            "square": np.square,
            "stop_gradient": np.asarray,
            "sub": np.subtract,
            "xor": np.bitwise_xor,
        }.items()
    },
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda equation, *x: np.concatenate(x, axis=equation.params["dimension"]),
    "convert_element_type": _convert,
    "cumsum": _cumsum,
    "div": _divide,
    "dot_general": _dot,
    "empty2": lambda equation: wide(np.zeros(_shape(equation), equation.outvars[0].aval.dtype)),
    "gather": _gather,
    "integer_pow": lambda equation, x: _power(x, equation.params["y"]),
    "iota": _iota,
    "optimization_barrier": lambda equation, *x: x,
    "pad": _pad,
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_or": _reduced(np.any),
    "reduce_sum": _reduced(np.sum),
    "reshape": lambda equation, x: np.reshape(x, _shape(equation)),
    "round": _round,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "squeeze": lambda equation, x: np.reshape(x, _shape(equation)),
    "stack": lambda equation, *x: np.stack(x, axis=equation.params["axis"]),
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "unstack": lambda equation, x: list(np.moveaxis(x, equation.params["axis"], 0)),
}
