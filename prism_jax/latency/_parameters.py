"""Parameters of all families: their dtypes and shapes, and the rules that `check` applies."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array


def as_parameters(*values: ArrayLike | Sequence[float]) -> list[Array]:
    """Arrays of one floating-point dtype: that of the given arrays, or the default one."""
    strong = [
        jnp.result_type(value)
        for value in values
        if isinstance(value, (jax.Array, np.ndarray))
        and not getattr(value, "weak_type", False)
        and jnp.issubdtype(value.dtype, jnp.floating)
    ]
    dtype = ft.reduce(jnp.promote_types, strong) if strong else jnp.result_type(float)
    return [_as_array(value, dtype) for value in values]


def _as_array(value: ArrayLike | Sequence[float], dtype) -> Array:
    """An array; of numbers of the host by NumPy, for JAX would compile it."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return jax.device_put(array.astype(dtype))
    return jnp.asarray(value, dtype)


def check_held(name: str, value: ArrayLike, held: Array) -> None:
    """Raises if a value in seconds, not traced, is so small that its dtype makes it zero."""
    if isinstance(value, jax.Array):
        return
    least, given = float(jnp.finfo(held.dtype).tiny), np.abs(np.asarray(value, np.float64))
    lost = (given > 0) & (given < least)
    if lost.any():
        raise ValueError(
            f"`{name}` is {given[lost].flat[0]:g}, less than the least number that {held.dtype} "
            f"holds, {least:.2g}; give 0 or more, or set `jax_enable_x64`."
        )


def broadcast_batch(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common batch shape of parameters, which have equal rank or are scalars."""
    if len({len(shape) for shape in shapes if shape}) > 1:
        raise ValueError(
            f"The batch shapes {', '.join(map(str, shapes))} differ in rank; give every parameter "
            "the same number of axes, or make it a scalar."
        )
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"The batch shapes {', '.join(map(str, shapes))} do not broadcast; give every axis "
            "the same length, or one."
        ) from None


def parameter_dtype(tree: eqx.Module) -> jnp.dtype:
    """The floating dtype that the arrays of a module promote to."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]
    return ft.reduce(jnp.promote_types, dtypes) if dtypes else jnp.zeros(()).dtype


class Rule(NamedTuple):
    """A rule by which `check` tests one parameter."""

    name: str
    value: Array
    holds: Callable[[np.ndarray], np.ndarray]
    allowed: str


def finite(name: str, value: Array) -> Rule:
    """A rule: finite numbers."""
    return Rule(name, value, np.isfinite, "finite")


def non_negative(name: str, value: Array) -> Rule:
    """A rule: finite numbers from zero up."""
    return Rule(name, value, lambda x: np.isfinite(x) & (x >= 0), "finite and at least 0")


def positive(name: str, value: Array) -> Rule:
    """A rule: numbers above zero, infinity included."""
    return Rule(name, value, lambda x: x > 0, "positive")
