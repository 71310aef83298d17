"""Opens, checks and reads tables in files, including errors that a cast would hide; reads those of
step times, and of how much longer compute takes on each GPU or node.
"""

import contextlib
import csv
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from .._files import Path, check_file, shown
from .._installed import needed
from .._misc import MOST_QUOTED, plural, quoted
from ..data import located


class _Lazy:
    """A module that is imported when it is first used, because that takes a while."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(needed(self._name), name)


if TYPE_CHECKING:
    import polars as pl
else:
    pl = _Lazy("polars")

# The most bytes of a table. Tables larger than memory are read in batches; a stream may be endless.
_MOST_BYTES = 2**40
_MOST_HEADER = 2**20
# Step times from a nanosecond to thirty years. A larger factor is a mistake, such as another unit;
# rates may be in FLOP/s.
_MOST_S, _MOST_FACTOR, _MOST_RATE = 1e9, 1e6, 1e18
# A column by another name than `gpu`, `rank` or `node` that says of which of these a row is.
_NAMES_PLACE = re.compile(r"(?i)(^|[_ .-])(rank|gpu|node|device|host)s?[_ ]?(id|index|name)?$")
# Rows that are compared at once.
_BLOCK = 2**20
# The most rows of step times, runs, and GPUs or nodes.
_MOST_STEPS, _MOST_RUNS, _MOST_GPUS = 5 * 10**7, 10**5, 10**7


def read_step_times(path: str | os.PathLike[str]) -> Float[np.ndarray, " steps"]:
    """Reads measured step times, in seconds, from the column `step_time_s` of a CSV or Parquet
    file.

    If there is a column `run`, the runs follow one another in the order of their first rows. If
    there is a column `step`, the steps of a run are sorted by it.

    **Raises:**

    `ValueError` if there are no step times, one is not a positive number, a `run` is empty, or a
    `step` is not an integer or occurs twice in its run.
    """
    return np.concatenate(read_runs(path))


def read_runs(path: Path) -> list[Float[np.ndarray, " steps"]]:
    """As `read_step_times`, but with a separate array for each `run`, if there is such a column.
    Without the column `step`, the steps of a run are in the order of the file.

    Up to 50 million rows are read, a column at a time, with at most 40 bytes of memory for each.
    """
    with scanned(path) as frame:
        columns = columns_of(frame, ["step_time_s"])
        check_rows(frame, _MOST_STEPS)
        integers = ["step"] if "step" in columns else []
        frame = with_numbers(frame, ["step_time_s", *integers], integers)
        runs, names = _runs(frame) if "run" in columns else (None, None)
        steps = _column(frame, "step").to_numpy() if integers else None
        values = _positive(frame, "step_time_s", "number of seconds", _MOST_S)
        keys = [key for key in (steps, runs) if key is not None]
        order = np.lexsort(keys) if keys else None
        if steps is not None and order is not None:
            _check_once(steps, runs, order, names)
    ends = [] if runs is None else np.cumsum(np.bincount(runs))[:-1]
    del keys, steps, runs
    return np.split(values if order is None else values[order], ends)


def _runs(frame: "pl.LazyFrame") -> tuple[np.ndarray, "pl.Series"]:
    """The number of each row's run, in the order of their first rows, and the names of the runs."""
    if frame.collect_schema()["run"].is_nested():
        raise ValueError("the column `run` holds lists or tables; give names.")
    run = pl.col("run").cast(pl.String)
    number = collect(frame.select(run.approx_n_unique())).item()
    if number > _MOST_RUNS:
        raise ValueError(
            f"the column `run` has about {number:,} names, and up to {_MOST_RUNS:,} runs are read; "
            "give fewer."
        )
    names = collect(frame.select(run.unique(maintain_order=True)))["run"].drop_nulls()
    numbered = frame.with_columns(run=run.cast(pl.Enum(names)).to_physical().cast(pl.UInt32))
    return _column(numbered, "run").to_numpy(), names


def _check_once(
    steps: np.ndarray, runs: np.ndarray | None, order: np.ndarray, names: "pl.Series | None"
) -> None:
    """Raises if a step of a run has two rows, which are then next to each other in this order."""
    for begin in range(0, len(order) - 1, _BLOCK):
        block = order[begin : begin + _BLOCK + 1]
        twice = steps[block[1:]] == steps[block[:-1]]
        if runs is not None:
            twice &= runs[block[1:]] == runs[block[:-1]]
        if twice.any():
            row = block[np.argmax(twice)]
            of_run = (
                "" if runs is None or names is None else f" of run {quoted(names[int(runs[row])])}"
            )
            raise ValueError(
                f"step {steps[row]}{of_run} has two rows; keep one of them, or name the runs in a "
                "column `run`."
            )


def read_factors(
    path: Path, column: str = "factor"
) -> tuple[Float[np.ndarray, " gpus_or_nodes"], str | None]:
    """Reads a column of a CSV or Parquet file, such as how much longer compute takes on each GPU,
    or on each node, than on the mean one. Values are sorted by the column `gpu`, `rank` (the same)
    or `node` or, without these and others such as `global_rank`, are in the order of the file. Also
    returns `gpu` or `node`.

    **Raises:**

    `ValueError` if there are no values, or more than ten million, one is not a positive number, or
    `gpu` or `node` do not count from 0 up.
    """
    with scanned(path) as frame:
        columns = columns_of(frame, [column])
        by = [name for name in ("gpu", "rank", "node") if name in columns]
        if len(by) > 1:
            names = " and ".join(f"`{name}`" for name in by)
            raise ValueError(f"it has the columns {names}; keep one of them.")
        check_rows(frame, _MOST_GPUS)
        frame = with_numbers(frame, [column, *by], by)
        most = _MOST_FACTOR if column == "factor" else _MOST_RATE
        values = _positive(frame, column, "number", most)
        if not by:
            for name in columns:
                if name != column and _NAMES_PLACE.search(name):
                    raise ValueError(
                        f"it says by {quoted(name)} of what a row is; call that column `gpu`, "
                        "`rank` or `node`, with numbers from 0 up, or drop it if rows are in order."
                    )
            return values, None
        places = _column(frame, by[0]).to_numpy()
        order = np.argsort(places, kind="stable")
        wrong = np.flatnonzero(places[order] != np.arange(len(places)))
        if len(wrong):
            raise ValueError(
                f"`{by[0]}` must count from 0 to {len(places) - 1}, each once; {wrong[0]} is "
                "missing, or another number occurs twice."
            )
        return values[order], "node" if by[0] == "node" else "gpu"


def names_of_columns(path: Path) -> list[str]:
    """The names of the columns of a CSV or Parquet file."""
    with scanned(path) as frame:
        return frame.collect_schema().names()


def check_rows(frame: "pl.LazyFrame", most: int) -> None:
    """Raises a `ValueError` for a table of no rows, or of more than `most`. A Parquet file says in
    its footer how many it has, and need not be read: a small one may hold many.
    """
    number = collect(frame.select(pl.len())).item()
    if not number:
        raise ValueError("it has no rows.")
    if number > most:
        raise ValueError(f"it has {number:,} rows, and up to {most:,} are read; give fewer.")


def _column(frame: "pl.LazyFrame", name: str) -> "pl.Series":
    """A column without empty cells."""
    column = collect(frame.select(name))[name]
    if column.null_count():
        row = int(column.is_null().arg_max() or 0) + 1
        raise ValueError(f"`{name}` is empty in row {row}; fill or drop that row.")
    return column


def _positive(
    frame: "pl.LazyFrame", column: str, noun: str, most: float
) -> Float[np.ndarray, " rows"]:
    """The numbers of a column. It refuses empty cells, and values that are not numbers between
    `1 / most` and `most`.
    """
    value = pl.col(column).cast(pl.Float64, strict=False).fill_null(np.nan)
    values = _column(frame.select(value), column).to_numpy()
    wrong = ~((values >= 1 / most) & (values <= most))
    if wrong.any():
        row = int(np.argmax(wrong))
        cell = collect(frame.select(column).slice(row, 1))[column][0]
        if cell is None:
            raise ValueError(f"`{column}` is empty in row {row + 1}; fill or drop that row.")
        raise ValueError(
            f"`{column}` is {_cell(cell)} in row {row + 1}, but must be a positive "
            f"{noun}, from {1 / most:g} to {most:g}."
        )
    return values


@contextlib.contextmanager
def scanned(path: Path) -> Iterator["pl.LazyFrame"]:
    """A lazy table of the file with exactly this name, whose path is put before the sentence of an
    error that reading it raises.
    """
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
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        problem = f"it cannot be read as {suffix[1:]}: {_line(error)}"
        raise ValueError(f"{shown(path)}: {problem}.") from None
    with located(shown(path)):
        yield frame


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


def collect(frame: "pl.LazyFrame") -> "pl.DataFrame":
    """Reads a table in batches of rows, so that it can be of any size."""
    try:
        with _silence():
            return frame.collect(engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(
            f"it is damaged, or a column holds something else: {_line(error)}."
        ) from None


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


def columns_of(frame: "pl.LazyFrame", needed: Iterable[str]) -> list[str]:
    """The names of the columns. Raises a `ValueError` if a required column is missing."""
    columns = frame.collect_schema().names()
    if missing := [name for name in needed if name not in columns]:
        are = "column {} is" if len(missing) == 1 else "columns {} are"
        names = " and ".join(f"`{name}`" for name in missing)
        raise ValueError(
            f"the {are.format(names)} missing; it has "
            f"{quoted(', '.join(columns), 2 * MOST_QUOTED) or 'none'}."
        )
    return columns


def with_numbers(frame: "pl.LazyFrame", numbers: list[str], integers: list[str]) -> "pl.LazyFrame":
    """The table, in which the columns `integers`, a part of `numbers`, are integers. It refuses
    values that a cast would change silently (booleans, times, fractions), and strings in place of
    integers.
    """
    schema = frame.collect_schema()
    for name in numbers:
        kind = schema[name]
        if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
            holds = quoted(str(kind))
            raise ValueError(f"the column `{name}` holds {holds} values; give numbers.")
    if not integers:
        return frame
    casts = {}
    for name in integers:
        x = pl.col(name).cast(pl.Float64, strict=False)
        # Larger floats cannot represent all whole numbers.
        whole = pl.when(x.round() == x, x.abs() <= 2**53).then(x)
        kept = pl.col(name) if schema[name].is_integer() else whole
        casts[name] = kept.cast(pl.Int64, strict=False)
    wrong = {name: pl.col(name).is_not_null() & cast.is_null() for name, cast in casts.items()}
    counts = collect(frame.select(**{name: x.sum() for name, x in wrong.items()}))
    for name in integers:
        if number := counts[name][0]:
            first = collect(frame.filter(wrong[name]).select(name).head(1))[name][0]
            fraction = isinstance(first, float) and math.isfinite(first)
            problem = f"a fractional `{name}`" if fraction else f"a `{name}` that is not one"
            raise ValueError(
                f"{rows_have(number)} {problem}, the first {_cell(first)}; give whole numbers."
            )
    return frame.with_columns(**casts)


def rows_have(number: int) -> str:
    return f"{plural(number, 'row')} {'has' if number == 1 else 'have'}"


def _cell(value: object) -> str:
    return f"'{quoted(value)}'" if isinstance(value, str) else quoted(value)


def _line(error: BaseException) -> str:
    if not isinstance(error, Exception):  # A panic of polars.
        return "it is damaged"
    lines = str(error).strip().split("\n")
    return quoted(lines[0].rstrip("."), 2 * MOST_QUOTED)
