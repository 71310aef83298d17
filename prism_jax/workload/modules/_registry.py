"""Makes a module from its table in a file."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..._misc import quoted, subclasses, unknown_name
from ...data import Model
from ._base import AbstractModule


def modules() -> dict[str, type[AbstractModule]]:
    """The modules that files can name, including those of other packages."""
    return {cls.kind: cls for cls in subclasses(AbstractModule) if cls.kind is not None}


def make_module(model: Model, name: str) -> AbstractModule:
    """The module that a model calls `name`.

    **Arguments:**

    - `model`: the model. Its `modules` may have a table with this name; its own keys are used for
        keys that the table does not have.
    - `name`: the name of the table, or a kind of module.

    **Returns:**

    The module.

    **Raises:**

    A `ValueError` of one sentence for an unknown kind or key, or an invalid value.
    """
    table = dict((model.modules or {}).get(name, {}))
    kind, known = table.pop("kind", name), modules()
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(unknown_name("module", kind, known))
    fields = {field.name for field in dataclasses.fields(known[kind])}  # pyright: ignore
    where = f"model.modules.{name}"
    for key in table:
        if key not in fields:
            own = (f"{where}.{field}" for field in fields)
            raise ValueError(unknown_name("key", f"{where}.{key}", own))
    shared = {key: getattr(model, key, None) for key in fields}
    given = {key: value for key, value in shared.items() if value is not None} | table
    try:
        made = msgspec.convert(given, known[kind])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        missing = message.removeprefix("Object missing required field `")
        if missing != message:
            inner = f"{where}.{path.rstrip('`')}" if path else "model"
            missing = quoted(f"{inner}.{missing.rstrip('`')}")
            raise ValueError(
                f"the key `{missing}` is missing, which the module `{quoted(name)}` needs; add it."
            ) from None
        key = f"{where}.{path.rstrip('`')}" if path else where
        raise ValueError(f"the key `{quoted(key)}` cannot be used: {quoted(message)}.") from None
    _check_inner(table, made, where)
    return made


def _check_inner(given: Any, made: Any, where: str) -> None:
    """Raises a `ValueError` for an unknown key of a table within the table of a module."""
    if isinstance(given, Mapping) and dataclasses.is_dataclass(made):
        own = [f"{where}.{field.name}" for field in dataclasses.fields(made)]
        for key, value in given.items():
            if f"{where}.{key}" not in own:
                raise ValueError(unknown_name("key", f"{where}.{key}", own))
            _check_inner(value, getattr(made, key), f"{where}.{key}")
    elif isinstance(given, Sequence) and isinstance(made, tuple):
        for i, both in enumerate(zip(given, made, strict=True)):
            _check_inner(*both, f"{where}[{i}]")
