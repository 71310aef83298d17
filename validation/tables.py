"""Tables in Markdown, and scripts that print several of them."""

import argparse
import datetime
import os
import pathlib
import platform
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


# The figures of a row by name, as scripts print them with `--json`.
Row = dict[str, Any]
Rows = Iterator[Row]
Folder = pathlib.Path  # Of measured data.


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table, whose cells are shown as they are."""
    names = list(header)
    return "\n".join([line(names), "|" + "---|" * len(names), *map(line, rows)])


def line(cells: Iterable[Any]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table_of(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table of figures.

    **Arguments:**

    - `rows`: the figures; to each row with `predicted` and `measured` their relative `error` is
        added.
    - `columns`: by the text at the head of a column, a format of a row: `{error:+.1%}`.
    """
    return table(columns, (cells(row, *columns.values()) for row in rows))


def cells(row: Row, *forms: str) -> list[str]:
    """A row in some formats, as in `table_of`."""
    if "error" not in row and {"predicted", "measured"} <= row.keys():
        row = row | {"error": error_of(row)}
    return [_Cells().vformat(form, (), row) for form in forms]


_UNITS = {"c": 100.0, "m": 1000.0}


class _Cells(string.Formatter):
    """As `str.format`, with a space before the sign of per cent. `scattered` is that function, and
    `c` and `m` at the end print hundredths and thousandths."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.endswith("%"):
            return percent(value, form=format_spec[:-1])
        if format_spec == "scattered":
            return scattered(*value)
        if format_spec[-1:] in _UNITS:
            return format(_UNITS[format_spec[-1]] * value, format_spec[:-1])
        return super().format_field(value, format_spec)


def error_of(row: Row) -> float:
    """The predicted figure over the measured one, minus one."""
    return row["predicted"] / row["measured"] - 1


def percent(value: float, places: int = 1, form: str = "") -> str:
    """A relative error, with its sign unless a format says otherwise."""
    return f"{100 * value:{form or f'+.{places}'}f} %"


def scattered(value: float, noise: float) -> str:
    """A relative error, and in brackets how much it scatters."""
    return f"{percent(value, 2)} ({100 * noise:.2f})"


def by(key: str, rows: Iterable[Row]) -> dict[Any, list[Row]]:
    """The rows by their value of a key, in the order in which the values appear."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def options(about: str | None, **known: Any) -> Any:
    """What the command line of a script says.

    **Arguments:**

    - `about`: the text of `--help`, a docstring.
    - `known`: by name the value of an option that is not given, and its help. `False` is that of a
        switch; an option without such a value has a type in its place. Or a dictionary of what
        `argparse` has for it; with its name as `dest`, it is a word and not an option.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    for name, how in known.items():
        if isinstance(how, tuple):
            value, text = how
            kind = value if isinstance(value, type) else type(value)
            how = {"type": kind, "default": None if kind is value else value, "help": text}
            how = {"action": "store_true", "help": text} if value is False else how
        flags = [] if how.get("dest") == name else [f"--{name.replace('_', '-')}"]
        parser.add_argument(*flags, **how)
    return parser.parse_args()


def print_parts(about: str | None, parts: Mapping[str, Callable[[], str]]) -> None:
    """The script of some tables: prints all of them, or with `--only` one."""
    only = options(about, only={"choices": parts, "help": "one table only"}).only
    use_all_cores()
    for name, text_of in parts.items():
        if only in (None, name):
            print(text_of(), end="\n\n", flush=True)


def machine() -> Row:
    """What figures of time are of: the machine, the date, and Python."""
    name = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    date = str(datetime.date.today())
    return {"machine": name, "date": date, "python": platform.python_version()}


def use_all_cores() -> None:
    """Lets JAX have a device for each core."""
    import jax

    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
