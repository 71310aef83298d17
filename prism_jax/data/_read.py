"""Finds files, shipped ones by name and others by path, and reads and writes them, with an error of
one sentence for each mistake in them.
"""

import contextlib
import csv
import importlib.resources
import io
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from .._files import read_file, shown, written_whole
from .._misc import MOST_QUOTED, quoted, unknown_name
from ._types import NeverValidError, convert, explain


_T = TypeVar("_T", bound=msgspec.Struct)


# The largest files, in bytes. A table of the second size has a million rows; TOML is slow to read.
_MOST_TOML = 2**21
_MOST_CSV = 2**26
# More parts than any key has, because `tomllib` needs memory for the square of their number.
_MOST_PARTS = 12
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MOST_PARTS},}}")
_FOLDERS = {
    "job": "jobs",
    "model": "jobs/models",
    "device": "hardware/devices",
    "cluster": "hardware/clusters",
    "count of failures": "hardware/failures",
    "profile of kernels": "kernels",
    "software stack": "kernels/software",
    "network": "kernels/networks",
    "list of operators": "kernels/operators",
}


def data_folder(folder: str) -> pathlib.Path:
    """A folder such as `"hardware/devices"`, in the wheel or in the checkout."""
    package = pathlib.Path(str(importlib.resources.files("prism_jax.data")))
    installed = package / folder
    return installed if installed.is_dir() else package.parents[1] / folder


def list_names(kind: str) -> tuple[str, ...]:
    """The sorted names of what is shipped.

    **Arguments:**

    - `kind`: of which kind, as messages call it: `job`, `model`, `device`, `cluster` (families of
        them), `count of failures`, `profile of kernels` (of devices and of clusters), `software
        stack`, `network` (classes of them), or `list of operators`.
    """
    folder = data_folder(_FOLDERS[kind])
    if kind == "profile of kernels":
        return tuple(sorted(path.parent.name for path in folder.glob("*/source.toml")))
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def is_path(name: str | os.PathLike[str]) -> bool:
    """Whether `name` is a path rather than the name of a shipped file."""
    if not isinstance(name, str):
        return True
    return name.endswith(".toml") or "/" in name or os.sep in name or name in (".", "..")


def find_file(
    kind: str, name: str | os.PathLike[str], given_by: pathlib.Path | None = None
) -> pathlib.Path:
    """The file with a name or a path. A relative path is first looked up in the folder of the file
    that gives it.

    **Raises:**

    A `ValueError` if there is no such file.
    """
    known, by = list_names(kind), f"{shown(given_by)}: " if given_by else ""
    if not isinstance(name, str | os.PathLike):
        raise ValueError(
            f"{by}A value of type {type(name).__name__} was given in place of a {kind}; give the "
            "name of a shipped one, or the path of a `.toml` file."
        )
    if not is_path(name):
        if name not in known:
            if os.path.isfile(name):
                raise ValueError(
                    f"{by}{shown(name)}: this is a file, but a {kind} is a `.toml` file, or one of "
                    "the shipped names; give one of these."
                )
            raise ValueError(by + unknown_name(kind, name, known))
        return data_folder(_FOLDERS[kind]) / f"{name}.toml"
    name = os.fspath(name)
    # By the name as given, because `pathlib` drops a `/` at its end.
    if given_by is not None and not os.path.isabs(name):
        beside = os.path.join(given_by.parent, name)
        name = beside if os.path.exists(beside) else name
    if os.path.isdir(name):
        raise ValueError(
            f"{by}{shown(name)}: this is a folder, but a {kind} is a `.toml` file; give the file."
        )
    if not os.path.exists(name):
        raise ValueError(
            f"{by}{shown(name)}: there is no such file; give a `.toml` file, or one of the shipped "
            f"names: {', '.join(known[:12]) or 'none'}."
        )
    return pathlib.Path(name)


def is_profile(name: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a profile."""
    return os.path.isfile(os.path.join(name, "profile.toml"))


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the place of a mistake before the sentence of an error."""
    try:
        yield
    except ValueError as error:
        kind = NeverValidError if isinstance(error, NeverValidError) else ValueError
        raise kind(f"{where}: {error}") from None


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
    stated = table.pop("kind", None)
    if stated is None:
        raise ValueError(f'{shown(path)}: the key `kind` is missing; write `kind = "{kind}"`.')
    if stated != kind:
        written = f"'{quoted(stated)}'" if isinstance(stated, str) else quoted(stated)
        raise ValueError(f'{shown(path)}: `kind` is {written}, but must be "{kind}" here.')
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
            key, problem = explain(cells, error)
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


def write_csv(path: pathlib.Path, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> bytes:
    """Writes rows to a file that `read_rows` reads, and returns its content."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    content = text.getvalue().encode()
    with written_whole(path) as partial:
        partial.write_bytes(content)
    return content


def write_toml(
    path: pathlib.Path, kind: str, table: dict[str, Any], comments: Mapping[str, str] = {}
) -> None:
    """Writes a table, without what is `None`, to a file that `read_toml` reads; with comments
    beside its keys and before its sections, by their dotted names.
    """
    import tomli_w

    with written_whole(path) as partial:
        text = tomli_w.dumps({"kind": kind, **without_none(table)})
        partial.write_text(_commented(text, comments) if comments else text, encoding="utf-8")


def _commented(text: str, comments: Mapping[str, str]) -> str:
    """A text in TOML with comments, each once."""
    lines, uncommented, section = [], dict(comments), ""
    for line in text.splitlines():
        if header := re.fullmatch(r"\[+([^\[\]]+)\]+", line):
            section, key = header[1], header[1]
        else:
            name = re.match(r"([\w-]+) = ", line)
            key = f"{section}.{name[1]}".lstrip(".") if name else ""
        comment = quoted(uncommented.pop(key, ""), 200)
        if not comment:
            lines.append(line)
        elif header or line.endswith(("[", "{")):  # A section, or a list on further lines.
            lines += [f"# {comment}", line]
        else:
            lines.append(f"{line}  # {comment}")
    return "\n".join([*lines, ""])


def read_struct(path: str | os.PathLike[str], kind: str, cls: type[_T]) -> _T:
    """The content of a file of `kind`. A `ValueError` names the file and the key."""
    return convert(read_toml(path, kind), cls, lambda key: shown(path))


def _one_line(error: object) -> str:
    return quoted(" ".join(str(error).split()).rstrip("."), 2 * MOST_QUOTED)


def without_none(value: Any) -> Any:
    """The value without its `None`s, because TOML has no `null`."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [without_none(v) for v in value]
    return value
