"""The derivatives of the operations of JAX by NumPy: from those with respect to a result to those
with respect to its arguments. These have an axis of figures before the axes of values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special

from ._operations import dot_names
from ._places import pad_places, places_of_gather, places_of_scatter


_ROOT_OF_PI = math.sqrt(math.pi)


def _larger(x, y):
    """Whether `x` is the larger of two numbers, and half of it if they are equal, as in JAX."""
    return np.where(x == y, 0.5, x > y)


def _power_by_exponent(z, x, y):
    return np.where(x > 0, np.log(np.where(x > 0, x, 1)) * z, 0)


# By elements: the derivative of the result `z` with respect to each argument.
_SLOPES: dict[str, Sequence[Callable[..., Any] | float]] = {
    "abs": [lambda z, x: np.where(x >= 0, 1, -1)],
    "add": [1, 1],
    "add_any": [1, 1],
    "cbrt": [lambda z, x: z / (3 * x)],
    "convert_element_type": [1],
    "div": [lambda z, x, y: 1 / y, lambda z, x, y: -z / y],
    "erf": [lambda z, x: 2 / _ROOT_OF_PI * np.exp(-np.square(x))],
    "erf_inv": [lambda z, x: _ROOT_OF_PI / 2 * np.exp(np.square(z))],
    "erfc": [lambda z, x: -2 / _ROOT_OF_PI * np.exp(-np.square(x))],
    "exp": [lambda z, x: z],
    "expm1": [lambda z, x: z + 1],
    "lgamma": [lambda z, x: special.digamma(x)],
    "log": [lambda z, x: 1 / x],
    "log1p": [lambda z, x: 1 / (1 + x)],
    "max": [lambda z, x, y: _larger(x, y), lambda z, x, y: _larger(y, x)],
    "min": [lambda z, x, y: _larger(y, x), lambda z, x, y: _larger(x, y)],
    "mul": [lambda z, x, y: y, lambda z, x, y: x],
    "neg": [-1],
    "pow": [lambda z, x, y: y * np.power(x, np.where(y == 0, 1, y - 1)), _power_by_exponent],
    "reshape": [1],
    "sqrt": [lambda z, x: 0.5 / z],
    "square": [lambda z, x: 2 * x],
    "squeeze": [1],
    "sub": [1, -1],
}
_FLAT = {"floor", "round", "sign", "stop_gradient"}


def has_slopes(name: str) -> bool:
    """Whether NumPy has the derivatives of an operation; JAX has those of others."""
    return name in _SLOPES or name in _FLAT or name in _MOVED or name == "integer_pow"


def slopes(equation, of_result: Any, result: Any, args: list[Any]) -> list[Callable[[], Any]]:
    """The derivatives with respect to each argument of an equation, which are computed when they
    are called.

    **Arguments:**

    - `of_result`: the derivatives with respect to the result, `(figures, *shape)`; or a list of
        these if there are several results.
    """
    name = equation.primitive.name
    if name in _FLAT:
        return [lambda: None] * len(args)
    if name == "integer_pow":
        n, x = equation.params["y"], args[0]
        return [lambda: of_result * (n * x ** (n - 1) if n else np.zeros(np.shape(x)))]
    if name not in _SLOPES:
        return _MOVED[name](equation, of_result, result, *args)

    def one(x, slope):
        slope = slope(result, *args) if callable(slope) else slope
        found = of_result if isinstance(slope, int) and slope == 1 else of_result * slope
        return _summed(found, np.shape(x))

    pairs = zip(args, _SLOPES[name], strict=True)
    return [lambda x=x, slope=slope: one(x, slope) for x, slope in pairs]


def _summed(found, shape):
    """Derivatives with respect to an argument that is one number along axes of the result, or that
    has the elements of the result in another shape.
    """
    if found[0].size > math.prod(shape):
        shared = tuple(1 + axis for axis, size in enumerate(shape) if size == 1)
        found = found.sum(axis=shared if shape else tuple(range(1, found.ndim)))
    return found.reshape(len(found), *shape)


def _zeros(of_result, x) -> np.ndarray:
    return np.zeros((len(of_result), *np.shape(x)))


def _broadcast(equation, g, z, x, *_):
    places, shape = equation.params["broadcast_dimensions"], np.shape(x)
    own = {place for place, size in zip(places, shape, strict=True) if size == np.shape(z)[place]}
    others = tuple(1 + axis for axis in range(np.ndim(z)) if axis not in own)
    return [lambda: g.sum(axis=others).reshape(len(g), *shape)]


def _transposed(equation, g, z, x):
    back = np.argsort(equation.params["permutation"])
    return [lambda: np.transpose(g, [0, *(1 + back)])]


def _concatenated(equation, g, z, *args):
    axis = equation.params["dimension"]
    parts = np.split(g, np.cumsum([x.shape[axis] for x in args])[:-1], axis=1 + axis)
    return [lambda part=part: part for part in parts]


def _stacked(equation, g, z, *args):
    axis = 1 + equation.params["axis"]
    return [lambda i=i: np.take(g, i, axis=axis) for i in range(len(args))]


def _unstacked(equation, g, z, x):
    return [lambda: np.stack(g, axis=1 + equation.params["axis"])]


def _split(equation, g, z, x):
    return [lambda: np.concatenate(g, axis=1 + equation.params["axis"])]


def _padded(equation, g, z, x, fill):
    inner, elements, kept, into = pad_places(equation, x.shape)

    def of_x():
        spread = np.zeros((len(g), *inner))
        spread[(slice(None), *kept)] = g[(slice(None), *into)]
        return spread[(slice(None), *elements)]

    return [of_x, lambda: g.reshape(len(g), -1).sum(1) - of_x().reshape(len(g), -1).sum(1)]


def _sliced(equation, g, z, x):
    def of_x():
        params, whole = equation.params, _zeros(g, x)
        steps = params["strides"] or (1,) * x.ndim
        some = map(slice, params["start_indices"], params["limit_indices"], steps)
        whole[(slice(None), *some)] = g
        return whole

    return [of_x]


def _gathered(equation, g, z, x, indices):
    def of_x():
        places, valid = places_of_gather(equation, x, indices)
        whole = _zeros(g, x)
        taken: Any = slice(None), *(np.broadcast_to(place, g.shape[1:]) for place in places)
        np.add.at(whole, taken, np.where(valid, g, 0))
        return whole

    return [of_x, lambda: None]


def _scattered(equation, g, z, x, indices, updates, *, added: bool):
    places, valid = places_of_scatter(equation, x, indices, updates)
    taken = (slice(None), *(place[valid] for place in places))

    def of_x():
        whole = np.array(g)
        if not added:
            whole[taken] = 0
        return whole

    def of_updates():
        found = _zeros(g, updates)
        found[:, valid] = g[taken]
        return found

    return [of_x, lambda: None, of_updates]


def _reduced_sum(equation, g, z, x):
    axes = tuple(1 + axis for axis in equation.params["axes"])
    return [lambda: np.broadcast_to(np.expand_dims(g, axes), (len(g), *x.shape))]


def _reduced_most(equation, g, z, x):
    axes = tuple(equation.params["axes"])

    def of_x():
        most = x == np.expand_dims(z, axes)
        share = most / most.sum(axis=axes, keepdims=True)
        return np.expand_dims(g, tuple(1 + axis for axis in axes)) * share

    return [of_x]


def _cumsum(equation, g, z, x):
    axis = 1 + equation.params["axis"]
    if equation.params["reverse"]:
        return [lambda: np.cumsum(g, axis=axis)]
    return [lambda: np.flip(np.cumsum(np.flip(g, axis), axis=axis), axis)]


def _dot(equation, g, z, x, y):
    names_x, names_y, names_z = dot_names(equation, x.ndim, y.ndim)
    return [
        lambda: np.einsum(f"Z{names_z},{names_y}->Z{names_x}", g, y),
        lambda: np.einsum(f"Z{names_z},{names_x}->Z{names_y}", g, x),
    ]


def _selected(equation, g, z, which, *cases):
    return [
        lambda: None,
        *(lambda i=i: np.where(which == i, g, 0) for i in range(len(cases))),
    ]


def _clamped(equation, g, z, low, x, high):
    def one(place, where):
        return lambda: _summed(np.where(where, g, 0), np.shape(place))

    within = (x > low) & (x < high)
    return [one(low, low > x), one(x, within), one(high, high < x)]


_MOVED: dict[str, Callable[..., list[Callable[[], Any]]]] = {
    "broadcast_in_dim": _broadcast,
    "clamp": _clamped,
    "concatenate": _concatenated,
    "cumsum": _cumsum,
    "dot_general": _dot,
    "gather": _gathered,
    "pad": _padded,
    "reduce_max": _reduced_most,
    "reduce_min": _reduced_most,
    "reduce_sum": _reduced_sum,
    "scatter": lambda *args: _scattered(*args, added=False),
    "scatter-add": lambda *args: _scattered(*args, added=True),
    "select_n": _selected,
    "slice": _sliced,
    "split": _split,
    "stack": _stacked,
    "transpose": _transposed,
    "unstack": _unstacked,
}
