"""Latencies of kernels by shape: tables of few knots, fitted to measurements, and their files."""

import functools as ft
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .._misc import quoted
from ._read import located, read_rows, write_csv
from ._types import Label, Name, NonNegative, Positive


# A column and its power, 1 or -1: `heads/kv_heads` is (("heads", 1), ("kv_heads", -1)).
Product = tuple[tuple[str, int], ...]

_FACTOR = re.compile(r"([*/]?)([a-z_]+(?:\d+(?:x\d+)*)?)")
# What a file has in place of a number.
_UNIT = 1000


class Term(msgspec.Struct, frozen=True):
    """What a product of sizes adds to the logarithm of a latency: linear in the product's logarithm
    between evenly spaced knots, constant beyond the ends.

    **Attributes:**

    - `product`: the product.
    - `low`, `high`: the logarithms of the first and the last knot.
    - `values`: what is added at each knot; at least two.
    """

    product: Product
    low: float
    high: float
    values: tuple[float, ...]


class ShapeTable(msgspec.Struct, frozen=True):
    """The latency of a kernel by its shape: `work` times a factor that is additive in logarithms.

    **Attributes:**

    - `kernel`, `dtype`: the kind of kernel, and its dtype; empty for any.
    - `case`: which of the kind's tables this is: attention's size of heads, the exponent of the
        loads of experts; otherwise 0.
    - `work`: the product that the latency is proportional to where all terms are constant.
    - `constant`: the logarithm of the seconds for one unit of `work`.
    - `terms`: what the efficiency depends on.
    - `ranges`: the smallest and the largest fitted size of each column.
    """

    kernel: str
    dtype: str
    case: float
    work: Product
    constant: float
    terms: tuple[Term, ...]
    ranges: dict[str, tuple[float, float]]


class ShapeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a `shapes.csv`. With a single value and no range, `term` is the work, and the value
    the logarithm of the seconds for one unit of it. With a range and no value, `term` is a column.
    All other rows have the values at evenly spaced logarithms from `low` to `high`, in thousandths.
    """

    kernel: Name
    term: Name
    dtype: Label = ""
    case: NonNegative = 0.0
    low: Positive | None = None
    high: Positive | None = None
    values: str = ""


def parse_product(text: str) -> Product:
    """The factors of a product such as `batch*heads/kv_heads`."""
    factors = _FACTOR.findall(text)
    if "".join(map("".join, factors)) != text or not factors or factors[0][0]:
        raise ValueError(
            f"`{quoted(text)}` is not a product of columns; write one such as `m*n/k`."
        )
    return tuple((name, -1 if sign == "/" else 1) for sign, name in factors)


def written_product(product: Product) -> str:
    """The text that `parse_product` reads."""
    signs = {1: "*", -1: "/"}
    return "".join(f"{signs[power]}{name}" for name, power in product).removeprefix("*")


def column(name: str, sizes: Mapping[str, Any]) -> Any:
    """A column of a shape: one of its sizes, or the number of tiles or waves of its output.

    `tiles128x256` is how many tiles of 128 by 256 cover `m` by `n`, and `waves128x256x132` how
    often 132 multiprocessors must each take one. Sizes are numbers or NumPy arrays.
    """
    if name in sizes:
        return sizes[name]
    rows, columns, *units = _tile(name)
    # Rounds up, for numbers and for arrays.
    tiles = -(-sizes["m"] // rows) * -(-sizes["n"] // columns)
    return -(-tiles // units[0]) if units else tiles


@ft.cache
def _tile(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def outside(table: ShapeTable, sizes: Mapping[str, float]) -> tuple[str, ...]:
    """The columns of a shape that lie beyond the fitted range of a table."""
    return tuple(
        name for name, (low, high) in table.ranges.items() if not low <= sizes[name] <= high
    )


# The tables of each kind of kernel and dtype, by case.
Shapes = dict[str, tuple[ShapeTable, ...]]


def shape_key(kernel: str, dtype: str) -> str:
    """The key of the tables of a kind of kernel."""
    return f"{kernel} {dtype}"


def group_shapes(tables: Iterable[ShapeTable]) -> Shapes:
    """The tables by `shape_key`, and of each kind in the order of their cases."""
    shapes: Shapes = {}
    for table in sorted(tables, key=lambda table: table.case):
        key = shape_key(table.kernel, table.dtype)
        shapes[key] = (*shapes.get(key, ()), table)
    return shapes


@ft.cache
def read_shapes(path: pathlib.Path) -> Shapes:
    """The tables of a `shapes.csv`.

    **Raises:**

    A `ValueError` that names file and line.
    """
    rows_of: dict[tuple[str, str, float], list[tuple[str, ShapeRow]]] = {}
    for where, row in read_rows(path, ShapeRow):
        rows_of.setdefault((row.kernel, row.dtype, row.case), []).append((where, row))
    return group_shapes(_table(*labels, rows) for labels, rows in rows_of.items())


def _table(kernel: str, dtype: str, case: float, rows: list[tuple[str, ShapeRow]]) -> ShapeTable:
    work, constant, terms, ranges = None, 0.0, [], {}
    for where, row in rows:
        with located(where):
            product = parse_product(row.term)
            values = tuple(float(value) for value in row.values.split())
            if not all(map(math.isfinite, values)):
                raise ValueError("the column `values` is not finite; give numbers.")
            if row.low is None or row.high is None:
                if len(values) != 1:
                    raise ValueError("a row without a range is the work; give it one value.")
                work, constant = product, values[0]
                continue
            if len(values) == 1 or row.low > row.high or (values and row.low == row.high):
                raise ValueError("a term has at least two values, from `low` to a larger `high`.")
        if product == ((row.term, 1),) and not _tile(row.term):
            ranges[row.term] = (row.low, row.high)
        if values:
            steps = tuple(value / _UNIT for value in values)
            terms.append(Term(product, math.log(row.low), math.log(row.high), steps))
    if work is None:
        raise ValueError(f"{rows[0][0]}: `{quoted(kernel)}` has no row of its work; add one.")
    return ShapeTable(kernel, dtype, case, work, constant, tuple(terms), ranges)


def write_shapes(path: pathlib.Path, tables: Iterable[ShapeTable]) -> None:
    """Writes a `shapes.csv`, which `read_shapes` reads, with values rounded to a thousandth."""
    rows: list[tuple[Any, ...]] = []
    for table in tables:
        labels = (table.kernel, table.dtype, f"{table.case:g}" if table.case else "")
        rows.append((*labels, written_product(table.work), "", "", f"{table.constant:.5f}"))
        single = {term.product[0][0] for term in table.terms if len(term.product) == 1}
        for name, (low, high) in table.ranges.items():
            if name not in single:
                rows.append((*labels, name, f"{low:.10g}", f"{high:.10g}", ""))
        for term in table.terms:
            values = " ".join(f"{_UNIT * value:.0f}" for value in term.values)
            # Ends of ranges are whole numbers, which must not be rounded.
            digits = 10 if len(term.product) == 1 else 5
            ends = (f"{math.exp(end):.{digits}g}" for end in (term.low, term.high))
            rows.append((*labels, written_product(term.product), *ends, values))
    write_csv(path, ("kernel", "dtype", "case", "term", "low", "high", "values"), rows)
