"""Opens, checks and reads tables in files, including errors that a cast would hide."""

import contextlib
import csv
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from .._files import check_file, shown
from .._misc import MOST_QUOTED, counted, quoted


if TYPE_CHECKING:
    import polars as pl


# The most bytes of a table. Tables larger than memory are read in batches; a stream may be endless.
_MOST_BYTES = 2**40
_MOST_HEADER = 2**20


def scan(path: str | os.PathLike[str]) -> "pl.LazyFrame":
    """A lazy table of the file with exactly this name."""
    import polars as pl

    name = os.fspath(path)
    suffix = os.path.splitext(name)[1]
    if suffix not in (".parquet", ".csv"):
        raise ValueError(f"{shown(path)}: give a `.parquet` or a `.csv` file.")
    try:
        check_file(name, _MOST_BYTES)
        # Made absolute, so that polars does not take it for a home folder or a server's address.
        name = os.path.abspath(name)
        with _silence():
            if suffix == ".csv":
                _check_header(name)
                frame = pl.scan_csv(name, glob=False)
            else:
                frame = pl.scan_parquet(name, glob=False, hive_partitioning=False)
            frame.collect_schema()
    except FileNotFoundError:
        raise ValueError(f"{shown(path)}: there is no such file; give another.") from None
    except (*_errors(), OSError) as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read as {suffix[1:]}: {_line(error)}."
        ) from None
    return frame


def _check_header(path: str) -> None:
    """Refuses files that polars would misread: 16-bit text, and two columns of one name."""
    with open(path, "rb") as file:
        first = file.readline(_MOST_HEADER)
    if first[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in first[:2]:
        raise ValueError(f"{shown(path)}: it is text in UTF-16; save it in UTF-8.")
    try:
        names = next(csv.reader([first.decode("utf-8-sig", "replace")]), [])
    except csv.Error:  # Polars reports errors in the lines of a table.
        return
    twice = [name for name, number in Counter(names).items() if name and number > 1]
    if twice:
        raise ValueError(
            f"{shown(path)}: there are two columns `{quoted(twice[0])}`; keep one of them."
        )


def collect(frame: "pl.LazyFrame", path: str | os.PathLike[str]) -> "pl.DataFrame":
    """Reads a table in batches of rows, so that it can be of any size."""
    try:
        with _silence():
            return frame.collect(engine="streaming")
    except _errors() as error:
        raise ValueError(
            f"{shown(path)}: it is damaged, or a column holds something else: {_line(error)}."
        ) from None


def _errors() -> tuple[type[BaseException], ...]:
    """The errors that polars raises. Its panics are not an `Exception`."""
    import polars as pl

    return (pl.exceptions.PolarsError, pl.exceptions.PanicException)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps the stack traces that polars prints when it panics from stderr."""
    try:
        sys.stderr.flush()
        kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except (OSError, AttributeError, ValueError):  # Without a stderr there is nothing to do.
        yield
        return
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def columns_of(
    frame: "pl.LazyFrame", path: str | os.PathLike[str], needed: Iterable[str]
) -> list[str]:
    """The names of the columns. Raises a `ValueError` if a required column is missing."""
    given = frame.collect_schema().names()
    missing = [name for name in needed if name not in given]
    if missing:
        are = "column {} is" if len(missing) == 1 else "columns {} are"
        names = " and ".join(f"`{name}`" for name in missing)
        raise ValueError(
            f"{shown(path)}: the {are.format(names)} missing; it has "
            f"{quoted(', '.join(given), 2 * MOST_QUOTED) or 'none'}."
        )
    return given


def with_numbers(
    frame: "pl.LazyFrame", path: str | os.PathLike[str], numbers: list[str], integers: list[str]
) -> "pl.LazyFrame":
    """The table, in which the columns `integers`, a part of `numbers`, are integers. It refuses
    values that a cast would change silently (booleans, times, fractions), and strings in place of
    integers.
    """
    import polars as pl

    given = frame.collect_schema()
    for name in numbers:
        kind = given[name]
        if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
            what = quoted(str(kind))
            raise ValueError(
                f"{shown(path)}: the column `{name}` holds {what} values; give numbers."
            )
    as_float = {name: pl.col(name).cast(pl.Float64, strict=False) for name in integers}
    casts = {
        name: pl.col(name).cast(pl.Int64, strict=False)
        if given[name].is_integer()
        # Larger floats cannot represent all whole numbers.
        else pl.when(x.round() == x, x.abs() <= 2**53).then(x).cast(pl.Int64, strict=False)
        for name, x in as_float.items()
    }
    wrong = {name: pl.col(name).is_not_null() & cast.is_null() for name, cast in casts.items()}
    if integers:
        found = collect(frame.select(x.sum().alias(name) for name, x in wrong.items()), path)
        for name, number in found.row(0, named=True).items():
            if number:
                first = collect(frame.filter(wrong[name]).select(name).head(1), path)[name][0]
                fraction = isinstance(first, float) and math.isfinite(first)
                what = f"a fractional `{name}`" if fraction else f"a `{name}` that is not one"
                raise ValueError(
                    f"{shown(path)}: {rows_have(number)} {what}, the first {_cell(first)}; give "
                    "whole numbers."
                )
    return frame.with_columns(**casts)


def check_positive(
    table: "pl.DataFrame",
    path: str | os.PathLike[str],
    column: str,
    others: tuple[str, ...],
    what: str,
    most: float,
) -> None:
    """Refuses empty cells, and values that are not positive numbers between `1 / most` and `most`,
    in the column `value`.
    """
    for name in (*others, column):
        if table[name].null_count():
            row = int(table[name].is_null().arg_max() or 0) + 1
            raise ValueError(
                f"{shown(path)}: `{name}` is empty in row {row}; fill or drop that row."
            )
    values = table["value"].fill_null(np.nan).to_numpy()
    wrong = ~((values >= 1 / most) & (values <= most))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{shown(path)}: `{column}` is {_cell(table[column][row])} in row {row + 1}, but must "
            f"be a positive {what}, from {1 / most:g} to {most:g}."
        )


def rows_have(number: int) -> str:
    return f"{counted(number, 'row')} {'has' if number == 1 else 'have'}"


def _cell(value: object) -> str:
    return f"'{quoted(value)}'" if isinstance(value, str) else quoted(value)


def _line(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "it is damaged"
    lines = str(error).strip().split("\n")
    return quoted(lines[0].rstrip("."), 2 * MOST_QUOTED)
