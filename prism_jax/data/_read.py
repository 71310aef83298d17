"""Reading files and converting what is in them, with one sentence for each mistake."""

import csv
import pathlib
import re
import tomllib
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from .._misc import unknown_name


_T = TypeVar("_T", bound=msgspec.Struct)


def read_text(path: pathlib.Path) -> str:
    """The text of a file.

    **Raises:**

    A `ValueError` where it cannot be read or is not text.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not a text file in UTF-8; save it as one.") from None
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read ({error.strerror}).") from None


def read_toml(path: pathlib.Path, kind: str) -> dict[str, Any]:
    """The table in a file of `kind`, without the key `kind` itself.

    **Raises:**

    A `ValueError` where the file is not TOML or of another kind.
    """
    try:
        table = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not valid TOML: {_one_line(error)}.") from None
    given = table.pop("kind", None)
    if given is None:
        raise ValueError(f'{path}: the key `kind` is missing; write `kind = "{kind}"`.')
    if given != kind:
        raise ValueError(f'{path}: `kind` is {given!r}, but must be "{kind}" here.')
    return table


def read_csv(path: pathlib.Path, row_type: type[_T]) -> list[_T]:
    """The rows of a file, converted. Empty cells count as left out.

    **Raises:**

    A `ValueError` that names file and line.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    reader = csv.DictReader(lines)
    fields = {f.encode_name: f for f in msgspec.structs.fields(row_type)}
    for column in reader.fieldnames or ():
        if column not in fields:
            raise ValueError(f"{path}: {unknown_name('column', column, fields)}")
    for name, field in fields.items():
        if field.required and name not in (reader.fieldnames or ()):
            raise ValueError(f"{path}: the column `{name}` is missing.")
    rows = []
    for number, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path}, line {number}: it has not as many cells as the header.")
        cells = {name: cell for name, cell in row.items() if cell != ""}
        try:
            rows.append(msgspec.convert(cells, row_type, strict=False))
        except msgspec.ValidationError as error:
            key, problem = _explain(cells, error)
            raise ValueError(f"{path}, line {number}: column `{key}` {problem}.") from None
    return rows


def write_csv(path: pathlib.Path, header: tuple[str, ...], rows: list[tuple]) -> None:
    """Writes rows that `read_csv` reads."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def check_keys(
    raw: dict[str, Any], cls: type[msgspec.Struct], where: Callable[[str], str], prefix: str = ""
) -> None:
    """Raises where `raw` has a key that `cls` does not know, naming the near ones."""
    known = {f.encode_name: f.type for f in msgspec.structs.fields(cls)}
    for key, value in raw.items():
        if key not in known:
            sentence = unknown_name("key", f"{prefix}{key}", (f"{prefix}{k}" for k in known))
            raise ValueError(f"{where(prefix + key)}: {sentence}")
        inner = struct_type(known[key])
        if inner is None:
            continue
        if isinstance(value, dict):
            check_keys(value, inner, where, f"{prefix}{key}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, dict):
                    check_keys(item, inner, where, f"{prefix}{key}[{i}].")


def convert(raw: dict[str, Any], cls: type[_T], where: Callable[[str], str]) -> _T:
    """Converts a table to `cls`.

    **Arguments:**

    - `raw`: the table.
    - `cls`: what to make of it.
    - `where`: gives the origin of a dotted key, such as the path of its file.

    **Raises:**

    A `ValueError` of one sentence that names origin and key.
    """
    check_keys(raw, cls, where)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        key, problem = _explain(raw, error)
        raise ValueError(f"{where(key)}: the key `{key}` {problem}.") from None


def struct_type(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct within an annotation such as `tuple[Link, ...]` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    for argument in typing.get_args(annotation):
        found = struct_type(argument)
        if found is not None:
            return found
    return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _explain(raw: dict[str, Any], error: msgspec.ValidationError) -> tuple[str, str]:
    """The dotted key that an error of msgspec is about, and what is wrong with it."""
    message, _, path = str(error).partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        return f"{path}.{missing[1]}" if path else missing[1], "is missing; add it"
    value: Any = raw
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            break
    shown = "a table" if isinstance(value, dict) else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return path, f"is {shown}: {message[0].lower()}{message[1:]}"


def without_none(x: Any) -> Any:
    """TOML has no `null`: what is none is left out."""
    if isinstance(x, dict):
        return {k: without_none(v) for k, v in x.items() if v is not None}
    if isinstance(x, list | tuple):
        return [without_none(v) for v in x]
    return x
