"""Saves and loads programs.

A program is written field by field: fields may be arrays, numbers, texts, tuples, dictionaries, and
dataclasses of these. Classes are found by their names, among the classes that a field may hold and
all of their subclasses, so families of latencies may be the user's own.
"""

import dataclasses
import hashlib
import json
import os
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from .._files import damaged, read_archive, shown, write_archive
from .._misc import check_type, quoted
from ._program import Program, digest


_Format = Literal[6]
_WHAT = ("program", "save_program")


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes a program to a `.npz` file, whole or not at all.

    **Raises:**

    `OSError` if the file cannot be written, such as to a folder that does not exist; `ValueError`
    for a value that is not a program, and if the program holds a value that is not an array, a
    number, a string, or a container of these.
    """
    check_type(program, Program, "program", "write `save_program(program, path)`")
    writer = _Writer(_known_classes(), {})
    described = writer.encode(program)
    sealed = _sealed(program, json.dumps(described))
    header = {"format": get_args(_Format)[0], "digest": sealed, "program": described}
    write_archive(path, header, writer.arrays)


def load_program(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `save_program` wrote.

    **Raises:**

    `ValueError` if the file is damaged or not a program, or if it needs a latency class that was
    not imported or 64-bit numbers that are not enabled; `OSError` if it cannot be read.
    """
    header, arrays = read_archive(path, _About, *_WHAT)
    described = json.dumps(header.program)
    try:
        program = _Reader(_known_classes(), arrays).decode(header.program)
        if isinstance(program, Program) and _sealed(program, described) == header.digest:
            return program
    except _MissingError as missing:
        raise ValueError(f"`{shown(path)}` holds {missing}") from None
    except Exception as error:  # A damaged file may raise any error.
        raise damaged(path, *_WHAT) from error
    raise damaged(path, *_WHAT)


def _sealed(program: Program, described: str) -> str:
    """A digest that also depends on the kinds of arrays and containers."""
    return hashlib.sha256(f"{digest(program)}{described}".encode()).hexdigest()


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The description of a program: the digest of both, and the output of `_Writer`."""

    format: _Format
    digest: str
    program: dict[str, Any]


class _MissingError(Exception):
    """The file needs a class or numbers that are missing here."""


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Converts values to JSON types, and collects their arrays."""

    classes: dict[str, type]
    arrays: dict[str, np.ndarray]

    def encode(self, value: Any) -> Any:
        name = type(value).__qualname__
        match value:
            case jax.Array() | np.ndarray() | np.generic():
                tag = "array" if isinstance(value, jax.Array) else "numpy"
                return {tag: self._name(np.asarray(value))}
            case None | bool() | int() | float() | str():
                return value
            case dict():
                pairs = [[self.encode(key), self.encode(item)] for key, item in value.items()]
                return {"dict": pairs}
            case tuple() | list() if type(value) in (tuple, list):
                return {name: [self.encode(item) for item in value]}
        name = _name_of(type(value))
        if self.classes.get(name) is type(value):
            fields = {f: self.encode(getattr(value, f)) for f in _fields(type(value))}
            return {"class": name, "fields": fields}
        raise ValueError(
            f"The program holds a {name}, which cannot be saved; a program is made of arrays, "
            "numbers, texts and the classes that its fields name."
        )

    def _name(self, array: np.ndarray) -> str:
        if array.dtype.kind not in "biufcSU":
            raise ValueError(
                f"The program holds an array of {array.dtype}, which cannot be saved; use "
                "numbers or texts."
            )
        name = f"array{len(self.arrays)}"
        self.arrays[name] = array
        return name


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Converts JSON types and arrays back to values."""

    classes: dict[str, type]
    arrays: dict[str, np.ndarray]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        tag, of = next(iter(value.items()))
        if tag == "class":
            return self._object(of, value["fields"])
        if tag == "numpy":
            return self.arrays[of][()]  # A scalar if there are no axes.
        if tag == "array":
            return _as_jax(self.arrays[of])
        items = [self.decode(item) for pair in of for item in pair] if tag == "dict" else of
        if tag == "dict":
            return dict(zip(items[::2], items[1::2], strict=True))
        return {"tuple": tuple, "list": list}[tag](map(self.decode, items))

    def _object(self, name: str, fields: dict[str, Any]) -> Any:
        if name not in self.classes:
            raise _MissingError(
                f"a `{quoted(name)}`, which is not known here; import the module that has it."
            )
        # Not by its constructor, which may take other arguments than the fields.
        cls = self.classes[name]
        instance = object.__new__(cls)
        for field in _fields(cls):
            object.__setattr__(instance, field, self.decode(fields.pop(field)))
        if fields:
            raise ValueError
        return instance


def _as_jax(value: np.ndarray) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        array = jnp.asarray(value)
    if array.dtype != value.dtype:
        raise _MissingError(
            f"numbers of {value.dtype}, which JAX would cut; set `jax_enable_x64` to read it."
        )
    return array


def _fields(cls: type) -> list[str]:
    """The names of the fields that are written."""
    return [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known_classes() -> dict[str, type]:
    """The dataclasses that a program may contain, by their names."""
    todo, seen = [Program], dict[type, None]()
    while todo:
        cls = todo.pop()
        if cls not in seen:
            seen[cls] = None
            todo += cls.__subclasses__()
            for hint in typing.get_type_hints(cls).values():
                todo += _dataclasses_in(hint)
    return {_name_of(cls): cls for cls in seen}


def _dataclasses_in(hint: Any) -> Iterator[type]:
    """The dataclasses that a type names."""
    for inner in typing.get_args(hint):
        yield from _dataclasses_in(inner)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
