"""From what a file says of a module to the module."""

import dataclasses

import msgspec

from ..._misc import quoted, subclasses, unknown_name
from ...data import Model
from ._base import AbstractModule


def modules() -> dict[str, type[AbstractModule]]:
    """The modules that files can name, those of other packages too."""
    return {cls.kind: cls for cls in subclasses(AbstractModule) if cls.kind is not None}


def make_module(model: Model, name: str) -> AbstractModule:
    """The module that a model calls `name`.

    **Arguments:**

    - `model`: whose `modules` may have a table of this name, and whose own keys hold for what the
        table leaves out.
    - `name`: of the table, or the kind itself.

    **Returns:**

    The module.

    **Raises:**

    A `ValueError` of one sentence for a kind, key or value that is not known.
    """
    table = dict((model.modules or {}).get(name, {}))
    kind, known = table.pop("kind", name), modules()
    if kind not in known:
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
        return msgspec.convert(given, known[kind])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        missing = message.removeprefix("Object missing required field `")
        if missing != message:
            missing = missing.rstrip("`")
            raise ValueError(
                f"the key `model.{missing}` is missing, which the module `{quoted(name)}` needs; "
                "add it."
            ) from None
        key = f"{where}.{path.rstrip('`')}" if path else where
        raise ValueError(f"the key `{quoted(key)}` cannot be used: {quoted(message)}.") from None
