"""Lines of code by package: without blank lines, comments and docstrings; files, the longest file
and the longest function (without its docstring).

`python benchmarks/size.py [--json]`
"""

import argparse
import ast
import dataclasses
import io
import json
import pathlib
import tokenize
from collections.abc import Iterable


_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Size:
    """Of some files: lines of code, of docstrings, and of all kinds; the number of files, the lines
    of the longest, and those of the longest function without its docstring.
    """

    code: int
    docstrings: int
    lines: int
    files: int
    longest_file: int
    longest_function: int


def main() -> None:
    """Prints a table in Markdown, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    sizes = {name: _total(map(_of_file, paths)) for name, paths in _packages().items()}
    if as_json:
        print(json.dumps({name: dataclasses.asdict(size) for name, size in sizes.items()}))
        return
    names = [field.name for field in dataclasses.fields(Size)]
    print("| package |", " | ".join(name.replace("_", " ") for name in names), "|")
    print("|---" * (1 + len(names)) + "|")
    for name, size in sizes.items():
        print(f"| {name} |", " | ".join(f"{x:,}" for x in dataclasses.astuple(size)), "|")


def _packages() -> dict[str, list[pathlib.Path]]:
    """The files of each package, of all, and of what is beside it."""
    package = _ROOT / "prism_jax"
    found = {"(top)": sorted(package.glob("*.py"))}
    for folder in sorted(path.parent for path in package.glob("*/__init__.py")):
        found[folder.name] = sorted(folder.rglob("*.py"))
    found["prism_jax"] = [path for paths in found.values() for path in paths]
    for name in ("tests", "benchmarks"):
        found[name] = sorted((_ROOT / name).rglob("*.py"))
    return found


def _of_file(path: pathlib.Path) -> Size:
    text = path.read_text()
    docstrings = _docstrings(tree := ast.parse(text))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    functions = [
        len(_lines(node) - docstrings)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = text.count("\n")
    return Size(len(code - docstrings), len(docstrings), lines, 1, lines, max(functions, default=0))


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _docstrings(tree: ast.Module) -> set[int]:
    """The numbers of the lines of docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS | ast.Module) and ast.get_docstring(node) is not None:
            found |= _lines(node.body[0])
    return found


def _total(sizes: Iterable[Size]) -> Size:
    code, docstrings, lines, files, *longest = zip(*map(dataclasses.astuple, sizes), strict=True)
    sums = [sum(column) for column in (code, docstrings, lines, files)]
    return Size(*sums, *(max(column) for column in longest))


if __name__ == "__main__":
    main()
