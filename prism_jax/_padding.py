"""Arrays with room for more entries, in shapes that many programs share, and with them compiled
code. A module is the same class on the host, exact, and on the device, padded: the annotation of a
field names its axes, and its metadata say what padding holds.
"""

import dataclasses
import functools as ft
import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, UInt32


if typing.TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = Array | np.ndarray  # Of JAX on the device, and of NumPy on the host.
# On the device; a floating dtype is that of the program.
_KINDS: Any = {Int: np.int32, UInt32: np.uint32, Bool: np.bool_}
_DTYPES = {tuple(kind.dtypes): dtype for kind, dtype in _KINDS.items()}
_Module = TypeVar("_Module", bound=eqx.Module)


def bucket(number: int, least: int, step: int = 2) -> int:
    """The least of the sizes `least`, `least * step`, `least * step**2` ... that is enough."""
    size = least
    while size < number:
        size *= step
    return size


def pad(module: _Module, sizes: Mapping[str, int], dtype: DTypeLike) -> _Module:
    """A module on the device, with room at the end of each axis. Static fields stay as they are.

    **Arguments:**

    - `sizes`: the length of axes, by their names; others keep theirs, and so do axes before those
        that an annotation names.
    - `dtype`: of what is annotated as `Float` or `Real`. Whole numbers have 32 bits.
    """
    arrays: dict[str, Any] = {}
    for name, axes, of_annotation, fill in array_fields(type(module)):
        value = getattr(module, name)
        if isinstance(value, eqx.Module):
            arrays[name] = pad(value, sizes, dtype)
        elif axes is not None and value is not None:
            arrays[name] = _grown(value, axes, sizes, of_annotation or dtype, fill)
    return dataclasses.replace(module, **arrays)


def _grown(value: Any, axes: tuple[str, ...], sizes: Mapping[str, int], dtype, fill) -> Any:
    before = np.ndim(value) - len(axes)
    shape = *np.shape(value)[:before], *map(sizes.get, axes, np.shape(value)[before:])
    if isinstance(value, Tracer):
        widths = [(0, size - length) for size, length in zip(shape, value.shape, strict=True)]
        return jnp.pad(value.astype(dtype), widths, constant_values=fill)
    if isinstance(value, jax.Array) and (value.shape, value.dtype) == (shape, dtype):
        return value
    value = np.asarray(value)
    grown = np.full(shape, fill, dtype)
    grown[tuple(map(slice, value.shape))] = value
    return jax.device_put(grown)  # `jnp.asarray` would compile a copy for each shape.


def without_axes(module: eqx.Module, *axes: str) -> Any:
    """A module with `None` in place of each array that has one of these axes, and of each module
    that has no array left.
    """
    dropped, kept = {}, 0
    for name, of_array, *_ in array_fields(type(module)):
        value = getattr(module, name)
        if isinstance(value, eqx.Module):
            dropped[name] = without_axes(value, *axes)
            kept += dropped[name] is not None
        elif of_array is not None and not {*axes}.isdisjoint(of_array):
            dropped[name] = None
        else:
            kept += value is not None
    return dataclasses.replace(module, **dropped) if kept else None


@ft.cache
def array_fields(cls: type) -> list[tuple[str, tuple[str, ...] | None, Any, Any]]:
    """The names of the fields that are not static, with the axes of arrays, their dtype, or `None`
    for one of floats, and what their padding holds.
    """
    fields = []
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if field.metadata.get("static"):
            continue
        axes, dtype = None, None
        hints: tuple[Any, ...] = field.type, *typing.get_args(field.type)
        for hint in hints:
            if hasattr(hint, "dim_str"):
                named = hint.dim_str.removeprefix("... ")
                if not re.fullmatch(r"[\w ]*", named):
                    raise TypeError(f"`{cls.__name__}.{field.name}` has axes without names.")
                axes, dtype = tuple(named.split()), _DTYPES.get(tuple(hint.dtypes))
        fields.append((field.name, axes, dtype, field.metadata.get("fill", 0)))
    return fields
