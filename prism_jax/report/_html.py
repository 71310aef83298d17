"""HTML from texts: whatever comes from a user is escaped here, and nowhere else."""

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Any


_MOST_ROWS = 16  # A longer table is folded.


class Markup(str):
    """A text that is HTML already."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number's text, and the value to sort by. `None` is an unknown number, and sorts last."""

    text: str
    value: float | None


def markup(given: Any) -> Markup:
    """A text as HTML."""
    return given if isinstance(given, Markup) else Markup(html.escape(str(given)))


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """An element. In names of attributes `_` becomes `-`; a `_` at the end is dropped."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{listed}>{join(content)}</{name}>")


def join(parts: Iterable[Any]) -> Markup:
    return Markup("".join(map(markup, parts)))


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table whose columns the page's script makes sortable; a wide table scrolls in its frame."""
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    body = join(_row(row) for row in rows)
    parts = (tag("caption", caption), tag("thead", head), tag("tbody", body))
    return tag(
        "div",
        tag("table", *parts),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def folded(listed: Markup, what: str, number: int) -> Markup:
    """A table of many rows, folded; the page's script unfolds it for a printer."""
    if number <= _MOST_ROWS:
        return listed
    return tag("details", tag("summary", f"All {number:,} {what}"), listed)


def _row(row: Sequence[Any]) -> Markup:
    first = tag("th", _text(row[0]), scope="row", data_value=_value(row[0]))
    return tag("tr", first, *(_cell(cell) for cell in row[1:]))


def _cell(cell: Any) -> Markup:
    return tag(
        "td",
        _text(cell),
        class_="number" if isinstance(cell, Number) else None,
        data_value=_value(cell),
    )


def _text(cell: Any) -> Any:
    return cell.text if isinstance(cell, Number) else cell


def _value(cell: Any) -> Any:
    """The value that a number sorts by; an empty text for an unknown number."""
    if not isinstance(cell, Number):
        return None
    return "" if cell.value is None else repr(float(cell.value))
