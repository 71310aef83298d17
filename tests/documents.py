"""What the documents print and a reader would run: see `tests/test_documents.py`."""

import json
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple


ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
NOTEBOOKS = tuple(sorted((ROOT / "notebooks").glob("*.ipynb")))
# What stands before a block that is only to be looked at, with the reason.
_SHOWN = re.compile(r"<!-- not run: (.+) -->")


class Code(NamedTuple):
    """A block of code, or one within a line.

    **Attributes:**

    - `page`: of the repository; `line` is its first.
    - `language`: of a block, empty where it has none; `row` for a row of a table.
    - `text`: of it.
    - `reason`: why it is not run; empty where it is.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: pathlib.Path) -> Iterator[Code]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    place = page.relative_to(ROOT).as_posix()
    reason, start, language = "", None, ""
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if start is None:
                start, language = number, line[3:]
            else:
                text = "\n".join(lines[start : number - 1])
                yield Code(place, start + 1, language, text, reason)
                start, reason = None, ""
        elif start is None and line:
            found = _SHOWN.fullmatch(line)
            reason = found[1] if found else ""


def cells(notebook: pathlib.Path) -> Iterator[Code]:
    """The cells of code of a notebook, in order."""
    place = notebook.relative_to(ROOT).as_posix()
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"], 1):
        if cell["cell_type"] == "code":
            yield Code(place, number, "python", "".join(cell["source"]))


def row_codes(page: pathlib.Path) -> Iterator[Code]:
    """The pieces of code in the rows of a page's tables."""
    place = page.relative_to(ROOT).as_posix()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("|"):
            for text in re.findall(r"`([^`]+)`", line):
                yield Code(place, number, "row", text)


def command_lines(text: str) -> list[list[str]]:
    """The words of each line, of which one that ends with a backslash goes on in the next."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]
