"""Summaries of results: a title and a few rows, as text and as a table in a notebook."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from ._estimate import Estimate


_MOST_ROWS = 20  # So that it fits a screen.


@dataclasses.dataclass(frozen=True)
class Summary:
    """**Attributes:**

    - `title`: one sentence.
    - `rows`: the rows, each as long as the `header`, if there is one. Rows beyond the first few are
        only counted.
    - `notes`: sentences below the rows.
    """

    title: str
    rows: Sequence[Sequence[Any]]
    header: Sequence[str] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """The summary as text, in columns of equal width."""
        rows = [list(self.header)] * bool(self.header) + self._shown()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if i and self.header else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines, *self._more()])

    def html(self) -> str:
        """The summary as an HTML table, whose caption is the title."""
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        head = f"<thead><tr>{head}</tr></thead>" if head else ""
        rows = [
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._shown()
        ]
        more = "".join(f"<p>{html.escape(line)}</p>" for line in self._more())
        return f"<table>{caption}{head}<tbody>{''.join(rows)}</tbody></table>{more}"

    def _shown(self) -> list[list[str]]:
        return [[_cell(value) for value in row] for row in self.rows[:_MOST_ROWS]]

    def _more(self) -> list[str]:
        left = len(self.rows) - _MOST_ROWS
        return [f"... and {left:,} more"] * (left > 0) + [*self.notes]


def _cell(value: Any) -> str:
    if isinstance(value, Estimate):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
