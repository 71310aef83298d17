"""HTML from texts, tables and figures: whatever comes from a user is escaped here, and nowhere
else.
"""

import dataclasses
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._installed import needed
from .._summary import Table, number_of


_MOST_ROWS = 16  # A longer table is folded.
# Colours of `plot`, and their variables in the page's style, which is light or dark.
_COLOURS = {
    "#000000": "--ink",
    "#ffffff": "--paper",
    "#c9d8ee": "--light",
    "#7c9fd0": "--medium",
    "#17335f": "--dark",
    "#b5301c": "--accent",
    "#d9d9d9": "--grey",
}
_WIDTH = 9.0  # Of figures, in inches, of 100 pixels.


class Markup(str):
    """A text that is HTML already."""


# What can stand in a section: a paragraph, a table or an element.
Block = str | Table | Markup


def markup(text: Any) -> Markup:
    """A text as HTML."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


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


def blocks(parts: Iterable[Block]) -> Markup:
    """What stands one below the other: a text is a paragraph, a table is shown, and elements are as
    they are.
    """
    shown = (table(part) if isinstance(part, Table) else part for part in parts)
    return join(part if isinstance(part, Markup) else tag("p", part) for part in shown)


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
    attributes = {"scope": "row"} if name == "th" else {}
    if number is not None and not isinstance(text, Markup):
        attributes |= {"class_": "number"} if name == "td" else {}
        attributes["data_value"] = "" if number != number else repr(number)
    return tag(name, text, **attributes)


def figure_tiles(figures: Mapping[str, object], **attributes: str) -> Markup:
    """Figures by their names."""
    listed = (tag("div", tag("dt", name), tag("dd", value)) for name, value in figures.items())
    return tag("dl", *listed, class_="tiles", **attributes)


def check_matplotlib() -> None:
    """Raises an `ImportError` if matplotlib is not installed; called before the simulation."""
    needed(
        "matplotlib.figure"
    )  # What figures need, so that a page is written at once after Ctrl-C.


def svg_figure(name: str, caption: str, height: float, draw: Callable[[Any], Any]) -> Markup:
    """A figure as SVG, so many inches high. Its caption also describes it to readers who cannot
    see it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH, height), layout="constrained")
    written = io.StringIO()
    # Without a salt, the ids within the file would differ each time.
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        draw(drawn.subplots())
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        drawn.savefig(written, format="svg", transparent=True, dpi=200, metadata=nothing)
    return tag("figure", _inline(written.getvalue(), name, caption), tag("figcaption", caption))


def _inline(svg: str, name: str, caption: str) -> Markup:
    """An SVG file as part of a page, in which no other figure has its ids."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'\bfill="(#\w+)"', r'style="fill: \1"', svg)  # Only styles know variables.
    for colour, variable in _COLOURS.items():
        svg = svg.replace(f" {colour}", f" var({variable})")
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{markup(caption)}"', 1))
