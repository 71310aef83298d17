"""Tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table, whose cells are shown as they are."""
    lines = [line(header), "|" + "---|" * len(header)]
    return "\n".join(lines + [line(row) for row in rows])


def line(cells: Iterable[Any]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def by(key: str, rows: Iterable[Mapping[str, Any]]) -> dict[Any, list[Any]]:
    """The rows by their value of a key, in the order in which the values appear."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def percent(value: float, places: int = 1) -> str:
    """A relative error, with its sign."""
    return f"{100 * value:+.{places}f} %"


def scattered(value: float, noise: float) -> str:
    """A relative error, and in brackets how much it scatters."""
    return f"{percent(value, 2)} ({100 * noise:.2f})"
