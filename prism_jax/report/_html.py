"""HTML from texts: whatever comes from a user is escaped here, and nowhere else."""

import dataclasses
import html
from collections.abc import Iterable
from typing import Any

from .._summary import Table, number_of


_MOST_ROWS = 16  # A longer table is folded.


class Markup(str):
    """A text that is HTML already."""


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


def table(of: Table, fold: str = "", **changes: Any) -> Markup:
    """A table whose columns the page's script makes sortable; a wide one scrolls in its frame. A
    long one of what `fold` says is folded, until the script unfolds it for a printer.
    """
    of = dataclasses.replace(of, most=None, **changes)
    head = tag("tr", *(tag("th", name, scope="col") for name in of.header()))
    body = join(tag("tr", *map(_cell, row, ["th", *["td"] * len(row)])) for row in of.cells())
    parts = (tag("caption", of.title), tag("thead", head), tag("tbody", body))
    frame = {"class_": "scroll", "tabindex": 0, "role": "region", "aria_label": of.title}
    listed = tag("div", tag("table", *parts), **frame)
    if fold and len(of.rows) > _MOST_ROWS:
        listed = tag("details", tag("summary", f"All {len(of.rows):,} {fold}"), listed)
    return join([listed, *(tag("p", note, class_="note") for note in of.notes)])


def _cell(text: str, name: str) -> Markup:
    """A cell, with what a number sorts by; that is empty for an unknown number."""
    number = number_of(text)
    about = {"scope": "row"} if name == "th" else {}
    if number is not None and not isinstance(text, Markup):
        about |= {"class_": "number"} if name == "td" else {}
        about["data_value"] = "" if number != number else repr(number)
    return tag(name, text, **about)
