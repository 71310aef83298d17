"""Lines of code by package: without blank lines, comments and docstrings; files, the longest file
and the longest function (without its docstring); how many public names there are; and how many
files and functions of the package one `simulate` of a job enters: `python benchmarks/size.py`.
"""

import ast
import collections
import io
import itertools as it
import json
import pathlib
import sys
import tokenize


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import Row, options, table


_ROOT = pathlib.Path(__file__).resolve().parents[1]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NO_CODE |= {tokenize.ENDMARKER}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


# Lines of code, of docstrings, and of all kinds; the number of files, the lines of the longest, and
# those of the longest function without its docstring.
_COLUMNS = ("code", "docstrings", "lines", "files", "longest file", "longest function")
_JOB, _SAMPLES = "gpt3-175b-h100-4096", 4096
# Names of variables that do not say what a value is.
_PRONOUNS = (
    "about all_ both each every few found further given half known left less many mine more near "
    "one other others own part parts rest said some such that these this those told what where "
    "which whole"
)
# The same thing, exact and padded.
_TWINS = (
    ({"Levels"}, {"Lanes"}),
    ({"Rows", "Ops"}, {"Graph"}),
    ({"Blocks"}, {"Collapse"}),
    ({"Sides"}, {"Overlaps"}),
    ({"ExpertLoads"}, {"Loads"}),
    ({"LatencyTable", "Adjustment"}, {"Parameters"}),
)


def main() -> None:
    """Prints a table in Markdown, or a JSON object."""
    given = options(__doc__, json=(False, "print one JSON object"))
    import prism_jax as prism

    found: dict[str, Row] = {}
    for name, paths in _packages().items():
        columns = list(zip(*map(_of_file, paths), strict=True))
        sizes = (*map(sum, columns[:4]), *map(max, columns[4:]))
        found[name] = dict(zip(_COLUMNS, sizes, strict=True))
    public, entered = len(dir(prism)), _entered_by_simulate()
    files = len({file for file, _ in entered})
    names, homonyms, twins = _variables(), _homonyms(), _twins()
    pronouns = sum(names[name] for name in _PRONOUNS.split()) / names.total()
    if given.json:
        numbers = {"public_names": public, "simulate_files": files}
        numbers |= {"simulate_functions": len(entered), "pronouns": pronouns}
        numbers |= {"homonyms": len(homonyms), "twins": len(twins)}
        print(json.dumps({"packages": found, **numbers}))
        return
    cells = [(name, *(f"{x:,}" for x in row.values())) for name, row in found.items()]
    print(table(("package", *_COLUMNS), cells))
    print(f"\n{public} public names")
    print(f"`simulate` enters {len(entered)} functions of {files} files")
    frequent = ", ".join(f"{name} {count}" for name, count in names.most_common(10))
    print(f"{pronouns:.1%} of local names are pronouns; the most frequent names: {frequent}")
    print(f"{len(homonyms)} names are of several files: {', '.join(homonyms)}")
    print(f"{len(twins)} things exist twice: {'; '.join(map(' and '.join, twins))}")


def _entered_by_simulate() -> set[tuple[str, int]]:
    """The functions of the package that one `simulate` of a job enters, by file and line; to
    compile the job does not count.
    """
    import jax

    import prism_jax as prism

    program, simulate = prism.compile_job(prism.load_job(_JOB)), prism.simulate
    key, entered, package = jax.random.key(0), set(), str(_ROOT / "prism_jax")

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            entered.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(enter)
    try:
        simulate(program, num_samples=_SAMPLES, key=key)
    finally:
        sys.setprofile(None)
    return entered


def _trees() -> dict[pathlib.Path, ast.Module]:
    """The syntax trees of the package's files."""
    paths = sorted((_ROOT / "prism_jax").rglob("*.py"))
    return {path: ast.parse(path.read_text()) for path in paths}


def _variables() -> collections.Counter[str]:
    """In how many functions each name is that of an argument or of a local variable."""
    names = collections.Counter[str]()

    def of_function(node: ast.AST) -> set[str]:
        local = set[str]()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTIONS | ast.Lambda):
                names.update(of_function(child))
            elif isinstance(child, ast.arg):
                local.add(child.arg)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                local.add(child.id)
            else:
                local |= of_function(child)
        return local

    for tree in _trees().values():
        of_function(tree)
    return names


def _homonyms() -> list[str]:
    """The names of public functions and classes of several files, those of commands aside."""
    files = collections.Counter[str]()
    for path, tree in _trees().items():
        tops = (node for node in tree.body if isinstance(node, _FUNCTIONS | ast.ClassDef))
        public = {node.name for node in tops if not node.name.startswith("_")}
        files.update(public if path.parent.name != "cli" else ())
    return sorted(name for name, count in files.items() if count > 1)


def _twins() -> list[list[str]]:
    """The modules of a thing that is there both exact and padded."""
    nodes = it.chain.from_iterable(tree.body for tree in _trees().values())
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = [node.name for node in classes if "eqx.Module" in map(ast.unparse, node.bases)]
    there = [
        [n for n in [*a, *b] if n in names] for a, b in _TWINS if a & {*names} and b & {*names}
    ]
    return there + [[name] * 2 for name in ("Sinks",) if names.count(name) > 1]


def _packages() -> dict[str, list[pathlib.Path]]:
    """The files of each package, of all, and of what is beside it."""
    package = _ROOT / "prism_jax"
    found = {"(top)": sorted(package.glob("*.py"))}
    for path in sorted(package.glob("*/__init__.py")):
        found[path.parent.name] = sorted(path.parent.rglob("*.py"))
    found["prism_jax"] = [path for paths in found.values() for path in paths]
    return found | {
        n: sorted((_ROOT / n).rglob("*.py")) for n in ("tests", "benchmarks", "validation")
    }


def _of_file(path: pathlib.Path) -> tuple[int, ...]:
    """The values of the columns."""
    text = path.read_text()
    docstrings = _docstrings(tree := ast.parse(text))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    longest = max((len(_lines(node) - docstrings) for node in functions), default=0)
    lines = text.count("\n")
    return len(code - docstrings), len(docstrings), lines, 1, lines, longest


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _docstrings(tree: ast.Module) -> set[int]:
    """The numbers of the lines of docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            found |= _lines(node.body[0])
    return found


if __name__ == "__main__":
    main()
