"""One table, however a result is shown: as text, in a notebook, on a page, as CSV and as JSON."""

import csv
import dataclasses
import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._estimate import Estimate, rounded
from ._misc import printable


_MOST_ROWS = 20  # So that it fits a screen.
# Texts of numbers stand to the right, and are sorted by the first number.
_NUMBER = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)(?: [%+.(].*)?")
_UNKNOWN = ("", "-", "unknown")
# What a spreadsheet takes for a formula begins with one of these.
_FORMULA = ("=", "+", "-", "@")
# Bytes; as drivers count the memory of devices.
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Column:
    """What a table shows of each row.

    **Attributes:**

    - `name`, `unit`: its header; the unit stands in brackets.
    - `of`: a key or an attribute of the row, with dots between several, or a function of the row;
        `name` by default.
    - `form`: how a number is written, such as `.2f`, or `d` for whole numbers. By default, an
        [`Estimate`][] and an interval have the digits that they support, and other numbers five.
    - `error`: like `of`: the number's interval, or half its width, which sets the digits.
    - `scale`: what a number is multiplied by, such as 1e-9 for billions.
    """

    name: str
    of: str | Callable[[Any], Any] = ""
    form: str = ""
    unit: str = ""
    error: str | Callable[[Any], Any] = ""
    scale: float = 1.0

    @property
    def header(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, row: Any) -> str:
        value = _value_of(row, self.of or self.name)
        if self.scale != 1 and value is not None:
            value = value * self.scale
        if self.error and value is not None:
            error = _value_of(row, self.error)
            if isinstance(error, tuple | list):
                error = None if None in error else (error[1] - error[0]) / 2
            return rounded(value, math.nan if error is None else error * self.scale)
        return _text(value, self.form)


@dataclasses.dataclass(frozen=True)
class Table:
    """**Attributes:**

    - `columns`: what is shown of a row; of a row that is a tuple, each column shows one item.
        Without columns there is no header.
    - `rows`: dictionaries, objects or tuples.
    - `title`: one sentence, above.
    - `notes`: sentences below the rows.
    - `most`: rows beyond so many are only counted; by default all are shown.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Any]
    title: str = ""
    notes: Sequence[str] = ()
    most: int | None = None

    def cells(self) -> list[list[str]]:
        """The texts of the rows that are shown."""
        return [
            [_text(x) for x in row]
            if isinstance(row, tuple)
            else [column.text(row) for column in self._columns()]
            for row in self.rows[: self.most]
        ]

    def header(self) -> list[str]:
        return [printable(column.header) for column in self._columns()]

    def text(self) -> str:
        """Columns of text, those of numbers to the right."""
        body = self.cells()
        rows = [self.header(), *body] if self.columns else body
        of_numbers = [None not in map(number_of, column) for column in zip(*body, strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(
                    row, widths, of_numbers or [False] * len(row), strict=True
                )
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*[printable(self.title)] * bool(self.title), *lines, *self._below()])

    __str__ = text

    def html(self) -> str:
        """An HTML table, whose caption is the title."""
        caption = f'<caption style="text-align:left">{html.escape(printable(self.title))}</caption>'
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.header())
        head = f"<thead><tr>{head}</tr></thead>" if head else ""
        rows = [
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self.cells()
        ]
        below = "".join(f"<p>{html.escape(line)}</p>" for line in self._below())
        return f"<table>{caption}{head}<tbody>{''.join(rows)}</tbody></table>{below}"

    def csv(self) -> str:
        """All of each row. Nested values have columns of their own, such as `gain.value`, or
        `interval.low` and `interval.high` for a pair of numbers. Unknown values are empty. A text
        that a spreadsheet would take for a formula follows a `'`.
        """
        flat = [
            {_csv_cell(name): _csv_cell(value) for name, value in _flat(plain(row))}
            for row in self.rows
        ]
        file = io.StringIO()
        names = dict.fromkeys(name for row in flat for name in row)
        writer = csv.DictWriter(file, [*names], lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return file.getvalue().rstrip("\n")

    def _columns(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def _below(self) -> list[str]:
        num_hidden = len(self.rows) - (len(self.rows) if self.most is None else self.most)
        return [f"... and {num_hidden:,} more"] * (num_hidden > 0) + [*map(printable, self.notes)]


class Shown:
    """A result that shows itself, wherever it is shown: by lines, by a table, and as JSON."""

    __slots__ = ()

    def headline(self) -> str:
        """The lines that answer; none, where the table does."""
        return ""

    def summary(self) -> Table:
        """The table. It has no rows where the lines say all."""
        return Table((), ())

    def to_json(self) -> dict[str, Any]:
        """All fields, as in JSON."""
        return picked_attributes(self, *_fields(self))

    def __repr__(self) -> str:
        return self._short().text() or self.headline()

    def _repr_html_(self) -> str:
        return (
            self._short().html() if self._short().rows else f"<pre>{html.escape(repr(self))}</pre>"
        )

    def _short(self) -> Table:
        table = self.summary()
        return dataclasses.replace(table, most=table.most or _MOST_ROWS)


def number_of(text: str) -> float | None:
    """The number that a text begins with, `nan` if it is one that is not known, or `None`."""
    if text in _UNKNOWN:
        return math.nan
    match = _NUMBER.fullmatch(text)
    return float(match[1].replace(",", "")) if match else None


def plain(value: Any) -> Any:
    """Dictionaries, lists, numbers and strings, as in JSON. A number that is not finite becomes
    `None`.
    """
    if isinstance(value, Estimate):
        interval = [plain(end) for end in value.interval()]
        error = plain(value.standard_error)
        return {"value": plain(value.value), "standard_error": error, "interval": interval}
    if callable(to_json := getattr(value, "to_json", None)):
        return to_json()
    if names := _fields(value):
        return picked_attributes(value, *names)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _fields(value: Any) -> Sequence[str]:
    """The names of the fields of an object, if it has any."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return getattr(value, "__struct_fields__", ())


def picked_attributes(result: Any, *names: str) -> dict[str, Any]:
    """Some attributes, as in JSON."""
    return {name: plain(getattr(result, name)) for name in names}


def _value_of(row: Any, of: str | Callable[[Any], Any]) -> Any:
    if callable(of):
        return of(row)
    if isinstance(row, Mapping) and of in row:
        return row[of]
    for name in of.split("."):
        row = row.get(name) if isinstance(row, Mapping) else getattr(row, name)
    return row


def _text(value: Any, form: str = "") -> str:
    """A value as text on one line. What is not known is a dash, and an interval that is not is
    `unknown`.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, tuple | list) and len(value) == 2:
        low, high = value
        if low is None or low != low:
            return "unknown"
        # Of a positive figure, whose ends may differ much, both have two digits at least.
        half_width = (high - low) / 2
        ends = (
            rounded(x, min(half_width, 0.31 * x) if low > 0 else half_width) for x in (low, high)
        )
        return " .. ".join(ends)
    if isinstance(value, float):
        return format(value, form or (",.0f" if 1e5 <= abs(value) < 1e15 else ".5g"))
    if isinstance(value, int) and not isinstance(value, bool):
        return format(value, form if form.endswith("d") else ",d")
    return printable(str(value))


def _csv_cell(value: Any) -> Any:
    """A value as a cell of a CSV file: a text that is not a number is one in a spreadsheet too."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    number = _NUMBER.fullmatch(text)
    is_number = number is not None and number[1] == text
    return f"'{text}" if text.startswith(_FORMULA) and not is_number else text


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
            value = dict(zip(("low", "high"), value, strict=True))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)
