"""Reads and converts files, with an error of one sentence for each mistake in them."""

import contextlib
import csv
import io
import os
import pathlib
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from .._files import read_file, shown, written_whole
from .._misc import MOST_QUOTED, quoted, unknown_name


_T = TypeVar("_T", bound=msgspec.Struct)


# The largest files, in bytes. A table of the second size has a million rows; TOML is slow to read.
_MOST_TOML = 2**21
_MOST_CSV = 2**26
# More parts than any key has, because `tomllib` needs memory for the square of their number.
_MOST_PARTS = 12
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MOST_PARTS},}}")


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the place of a mistake before the sentence of an error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """The text of a file of at most `most` bytes.

    **Raises:**

    A `ValueError` if it cannot be read or is not text.
    """
    try:
        return read_file(path, most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{shown(path)}: this is not a text file in UTF-8; save it as one."
        ) from None
    except OSError as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read ({error.strerror}); give another file."
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table that a text in TOML holds.

    **Raises:**

    A `ValueError` if the text is not TOML, nests too deeply, or has a number of more than 64 bits.
    """
    deep = _DEEP.search(text)
    if deep:
        raise ValueError(f"`{quoted(deep[0])}` has more than {_MOST_PARTS} parts")
    try:
        table = tomllib.loads(text)
        _check_integers(table)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it nests too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no number of more than 4,300 digits.
        raise ValueError(_TOO_LARGE) from None
    return table


_TOO_LARGE = "it has a whole number of more than 64 bits"


def _check_integers(value: Any) -> None:
    """Raises for integers beyond the range of TOML, which a float may not hold either."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_integers(item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(_TOO_LARGE)


def read_toml(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The table in a file of `kind`, without the key `kind` itself.

    **Raises:**

    A `ValueError` if the file is not TOML, or is of another kind.
    """
    text = read_text(path, _MOST_TOML)
    try:
        table = parse_toml(text)
    except ValueError as error:
        problem = f"this is not valid TOML: {_one_line(error)}"
        if text.lstrip().startswith("{"):
            problem = f"this is JSON, and a {kind} is a TOML file"
            if kind == "job":
                problem += "; make a job of a configuration with `prism-jax import`"
        raise ValueError(f"{shown(path)}: {problem}.") from None
    given = table.pop("kind", None)
    if given is None:
        raise ValueError(f'{shown(path)}: the key `kind` is missing; write `kind = "{kind}"`.')
    if given != kind:
        what = f"'{quoted(given)}'" if isinstance(given, str) else quoted(given)
        raise ValueError(f'{shown(path)}: `kind` is {what}, but must be "{kind}" here.')
    return table


def read_rows(path: pathlib.Path, row_type: type[_T]) -> Iterator[tuple[str, _T]]:
    """The converted rows of a CSV file, each after its file and line, for messages. Empty cells
    count as missing.

    **Raises:**

    A `ValueError` that names file and line.
    """
    fields = {f.encode_name: f for f in msgspec.structs.fields(row_type)}
    rows = _cells(path)
    _, header = next(rows, ("", []))
    for column in header:
        if column not in fields:
            raise ValueError(f"{shown(path)}: {unknown_name('column', column, fields)}")
    if len(set(header)) < len(header):
        raise ValueError(f"{shown(path)}: it has two columns of one name; keep one of them.")
    for name, field in fields.items():
        if field.required and name not in header:
            raise ValueError(f"{shown(path)}: the column `{name}` is missing; add it.")
    for where, row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"{where}: the row has another number of cells than the header; give {len(header)}."
            )
        cells = {name: cell for name, cell in zip(header, row, strict=True) if cell != ""}
        try:
            yield where, msgspec.convert(cells, row_type, strict=False)
        except msgspec.ValidationError as error:
            key, problem = _explain(cells, error)
            raise ValueError(f"{where}: column `{key}` {problem}.") from None


def _cells(path: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The rows that are not empty, as strings, each with its file and line."""
    reader = csv.reader(io.StringIO(read_text(path, _MOST_CSV), newline=""))
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield f"{shown(path)}, line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(
            f"{shown(path)}, line {reader.line_num}: this is not valid CSV: {_one_line(error)}."
        ) from None


def write_csv(path: pathlib.Path, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Writes rows to a file that `read_rows` reads."""
    with written_whole(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_toml(path: pathlib.Path, kind: str, table: dict[str, Any]) -> None:
    """Writes a table, without what is `None`, to a file that `read_toml` reads."""
    import tomli_w

    with written_whole(path) as partial:
        text = tomli_w.dumps({"kind": kind, **without_none(table)})
        partial.write_text(text, encoding="utf-8")


def check_keys(
    raw: dict[str, Any], cls: type[msgspec.Struct], where: Callable[[str], str], prefix: str = ""
) -> None:
    """Raises if `raw` has a key that `cls` does not have. The message names similar keys."""
    known = types_of(cls)
    for key, value in raw.items():
        if key not in known:
            sentence = unknown_name("key", f"{prefix}{key}", (f"{prefix}{k}" for k in known))
            raise ValueError(f"{where(prefix + key)}: {sentence}")
        if (inner := struct_type(known[key])) is None:
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, item in items:
            if isinstance(item, dict):
                place = key if i is None else f"{key}[{i}]"
                check_keys(item, inner, where, f"{prefix}{place}.")


def convert(raw: dict[str, Any], cls: type[_T], where: Callable[[str], str]) -> _T:
    """Converts a table to `cls`.

    **Arguments:**

    - `raw`: the table.
    - `cls`: the class to convert it to.
    - `where`: returns the origin of a dotted key, such as the path of its file.

    **Raises:**

    A `ValueError` of one sentence that names the origin and the key.
    """
    check_keys(raw, cls, where)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        key, problem = _explain(raw, error)
        choices = _choices(cls, key) if "enum" in problem else ()
        allowed = f"; give one of {', '.join(map(repr, choices))}" if choices else ""
        raise ValueError(f"{where(key)}: the key `{key}` {problem}{allowed}.") from None


def read_struct(path: str | os.PathLike[str], kind: str, cls: type[_T]) -> _T:
    """The content of a file of `kind`. A `ValueError` names the file and the key."""
    return convert(read_toml(path, kind), cls, lambda key: shown(path))


def types_of(cls: type[msgspec.Struct] | None) -> dict[str, Any]:
    """The types of the keys of a struct; empty for `None`."""
    return {f.encode_name: f.type for f in msgspec.structs.fields(cls)} if cls else {}


def _choices(cls: Any, key: str) -> tuple[Any, ...]:
    """The allowed values of an enumeration at a dotted key of a struct."""
    for name in re.sub(r"\[[^]]*\]", "", key).split("."):
        cls = types_of(struct_type(cls)).get(name)
    return _literals(cls)


def _literals(annotation: Any) -> tuple[Any, ...]:
    """The values of the `Literal` in an annotation."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return arguments
    return next(filter(None, map(_literals, arguments)), ())


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
    return quoted(" ".join(str(error).split()).rstrip("."), 2 * MOST_QUOTED)


def _explain(raw: dict[str, Any], error: msgspec.ValidationError) -> tuple[str, str]:
    """The dotted key that an error of msgspec is about, and the problem with its value."""
    message, _, path = str(error).partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        return quoted(f"{path}.{missing[1]}" if path else missing[1]), "is missing; add it"
    value: Any = raw
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            break
    if isinstance(value, dict):
        what = "a table"
    else:
        what = f"'{quoted(value)}'" if isinstance(value, str) else quoted(value)
    problem = quoted(f"{message[0].lower()}{message[1:]}", 2 * MOST_QUOTED)
    problem = problem.replace("expected `int`,", "expected `int`, a whole number such as 8192,")
    return quoted(path), f"is {what}: {problem}"


def without_none(x: Any) -> Any:
    """The value without its `None`s, because TOML has no `null`."""
    if isinstance(x, dict):
        return {k: without_none(v) for k, v in x.items() if v is not None}
    if isinstance(x, list | tuple):
        return [without_none(v) for v in x]
    return x
