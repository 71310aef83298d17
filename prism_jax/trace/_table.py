"""Tables in files: opened, checked for what a cast would hide, collected."""

import pathlib
from typing import TYPE_CHECKING

import numpy as np

from .._misc import counted


if TYPE_CHECKING:
    import polars as pl


def scan(path: pathlib.Path) -> "pl.LazyFrame":
    import polars as pl

    readers = {".parquet": pl.scan_parquet, ".csv": pl.scan_csv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: give a `.parquet` or a `.csv` file.")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        frame = readers[path.suffix](path)
        frame.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(
            f"{path}: it cannot be read as {path.suffix[1:]}: {_line(error)}."
        ) from None
    return frame


def collect(frame: "pl.LazyFrame", path) -> "pl.DataFrame":
    """In batches of rows, whatever the size of the file."""
    import polars as pl

    try:
        return frame.collect(engine="streaming")
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: a column holds something else: {_line(error)}.") from None


def check_numbers(frame: "pl.LazyFrame", path, numbers: list[str], integers: list[str]) -> None:
    """Refuses what a cast would change without a word: booleans, times, and fractions."""
    import polars as pl

    given = frame.collect_schema()
    for name in numbers:
        kind = given[name]
        if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
            raise ValueError(f"{path}: the column `{name}` holds {kind} values; give numbers.")
    floats = [name for name in integers if given[name].is_float()]
    if not floats:
        return
    fractional = [(pl.col(n).is_finite() & (pl.col(n) != pl.col(n).round())) for n in floats]
    found = collect(frame.select(x.sum() for x in fractional), path).row(0)
    for name, wrong, number in zip(floats, fractional, found, strict=True):
        if number:
            first = collect(frame.filter(wrong).select(name).head(1), path)[name][0]
            raise ValueError(
                f"{path}: {rows_have(number)} a fractional `{name}`, the first {first:g}; give "
                "whole numbers."
            )


def check_positive(
    table: "pl.DataFrame", path, column: str, others: tuple[str, ...], what: str
) -> None:
    """Refuses empty cells, and what is no positive number in the column that was made `value`."""
    for name in (*others, column):
        if table[name].null_count():
            row = int(table[name].is_null().arg_max() or 0) + 1
            raise ValueError(f"{path}: `{name}` is empty in row {row}; fill or drop that row.")
    values = table["value"].fill_null(np.nan).to_numpy()
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{path}: `{column}` is {table[column][row]!r} in row {row + 1}, but must be a "
            f"positive {what}."
        )


def rows_have(number: int) -> str:
    return f"{counted(number, 'row')} {'has' if number == 1 else 'have'}"


def _line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
