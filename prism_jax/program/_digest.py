"""A digest of a program: equal for equal programs, in every process and on every machine."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from .._misc import FrozenArray
from ._program import Program


def digest(program: Program) -> str:
    """Sixty-four hexadecimal digits that depend on the program and the values of its parameters."""
    state = hashlib.sha256()
    _feed(state, program)
    return state.hexdigest()


def _feed(state, value: Any) -> None:
    if isinstance(value, FrozenArray):
        value = value.value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        # Text has a width that depends on the longest word; objects have no bytes of their own.
        state.update(array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode())
    elif dataclasses.is_dataclass(value):
        state.update(type(value).__qualname__.encode())
        for field in dataclasses.fields(value):
            state.update(field.name.encode())
            _feed(state, getattr(value, field.name))
    elif isinstance(value, dict):
        for name in sorted(value):
            state.update(repr(name).encode())
            _feed(state, value[name])
    elif isinstance(value, tuple | list):
        state.update(f"{len(value)}".encode())
        for item in value:
            _feed(state, item)
    else:
        state.update(repr(value).encode())
