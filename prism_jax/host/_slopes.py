"""The derivatives of the operations of JAX by NumPy: from those with respect to a result to those
with respect to its arguments. These have an axis of figures before the axes of values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special

from ._operations import dot_names


_ROOT_OF_PI = math.sqrt(math.pi)


def _larger(x, y):
    """Whether `x` is the larger of two numbers, and half of it if they are equal, as in JAX."""
    return np.where(x == y, 0.5, x > y)


def _power_by_exponent(z, x, y):
    return np.where(x > 0, np.log(np.where(x > 0, x, 1)) * z, 0)


# By elements: the derivative of the result `z` with respect to each argument.
_OF_ELEMENTS: dict[str, Sequence[Callable[..., Any] | float]] = {
    "abs": [lambda z, x: np.where(x >= 0, 1, -1)],
    "add": [1, 1],
    "add_any": [1, 1],
    "cbrt": [lambda z, x: z / (3 * x)],
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


def _by_elements(of_each: Sequence[Callable[..., Any] | float]) -> Callable[..., Any]:
    """The derivatives of an operation, from the slopes of its result in its arguments."""

    def derivatives_of(equation, g, z, *args):
        def along(x, slope):
            slope = slope(z, *args) if callable(slope) else slope
            return _summed(g if isinstance(slope, int) and slope == 1 else g * slope, np.shape(x))

        pairs = zip(args, of_each, strict=True)
        return [lambda x=x, slope=slope: along(x, slope) for x, slope in pairs]

    return derivatives_of


def _summed(derivatives, shape):
    """Derivatives with respect to an argument that is one number along axes of the result, or that
    has the elements of the result in another shape.
    """
    if derivatives[0].size > math.prod(shape):
        shared = tuple(1 + axis for axis, size in enumerate(shape) if size == 1)
        derivatives = derivatives.sum(axis=shared if shape else tuple(range(1, derivatives.ndim)))
    return derivatives.reshape(len(derivatives), *shape)


def _broadcast(equation, g, z, x, *_):
    places, shape = equation.params["broadcast_dimensions"], np.shape(x)
    same_size = {
        place for place, size in zip(places, shape, strict=True) if size == np.shape(z)[place]
    }
    axes = tuple(1 + axis for axis in range(np.ndim(z)) if axis not in same_size)
    return [lambda: g.sum(axis=axes).reshape(len(g), *shape)]


def _converted(equation, g, z, x):
    return [lambda: g.real if np.isrealobj(x) else g]


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


def _sliced(equation, g, z, x):
    def of_x():
        params, whole = equation.params, np.zeros((len(g), *x.shape), g.dtype)
        steps = params["strides"] or (1,) * x.ndim
        slices = map(slice, params["start_indices"], params["limit_indices"], steps)
        whole[(slice(None), *slices)] = g
        return whole

    return [of_x]


def _reduced_sum(equation, g, z, x):
    axes = tuple(1 + axis for axis in equation.params["axes"])
    return [lambda: np.broadcast_to(np.expand_dims(g, axes), (len(g), *x.shape))]


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


def _power(equation, g, z, x):
    n = equation.params["y"]
    return [lambda: g * (n * x ** (n - 1) if n else np.zeros(np.shape(x)))]


def _flat(equation, g, z, x):
    return [lambda: None]


# From an equation, the derivatives with respect to its result, `(figures, *shape)`, its result and
# its arguments: a function for each argument, which computes the derivatives with respect to it.
# For operations that are not here, because they are rare, JAX has them.
SLOPES: dict[str, Callable[..., list[Callable[[], Any]]]] = {
    **{name: _by_elements(of_each) for name, of_each in _OF_ELEMENTS.items()},
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "convert_element_type": _converted,
    "dot_general": _dot,
    "floor": _flat,
    "integer_pow": _power,
    "reduce_sum": _reduced_sum,
    "round": _flat,
    "select_n": _selected,
    "sign": _flat,
    "slice": _sliced,
    "stack": _stacked,
    "stop_gradient": _flat,
    "transpose": _transposed,
}
