"""Whether two versions of the package differ in the names of local variables alone.

    python tools/renamed.py OLD NEW [name=new_name ...]

`OLD` and `NEW` are folders of Python files. Prints each function whose bytecode differs once local
names are numbered in the order in which they come, and global ones renamed as given.
"""

import dis
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping


_LOCAL = frozenset(dis.haslocal) | frozenset(dis.hasfree)
_GLOBAL = frozenset(dis.hasname)


def main() -> None:
    """Ends with 1 if anything else differs."""
    old, new, *names = sys.argv[1:]
    renamed = dict(name.split("=") for name in names)
    before, after = _functions(old, renamed), _functions(new, {})
    changed = sorted(key for key in before | after if before.get(key) != after.get(key))
    print(*changed, f"{len(after)} functions, {len(changed)} changed", sep="\n")
    sys.exit(bool(changed))


def _functions(folder: str, renamed: Mapping[str, str]) -> dict[str, list]:
    """The bytecode of each function, by file and place in it."""
    functions = {}
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        module = compile(path.read_text(), "", "exec")
        for place, code in enumerate(_codes(module)):
            key = f"{path.relative_to(folder)} {place} {renamed.get(code.co_name, code.co_name)}"
            functions[key] = _erased(code, renamed)
    return functions


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _erased(code: types.CodeType, renamed: Mapping[str, str]) -> list:
    """Operations and what they act on. Keywords of calls are constants, so they must be equal; what
    a function closes over comes in the order of names, which may change.
    """
    numbers: dict[str, int] = {}
    operations = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("MAKE_CELL", "COPY_FREE_VARS", "LOAD_CLOSURE"):
            continue
        value = instruction.argval
        if instruction.opcode in _LOCAL:
            value = numbers.setdefault(str(value), len(numbers))
        elif instruction.opcode in _GLOBAL:
            value = renamed.get(str(value), value)
        elif isinstance(value, types.CodeType):
            value = None
        elif isinstance(value, tuple):
            value = tuple(renamed.get(x, x) if isinstance(x, str) else x for x in value)
        operations.append((instruction.opname, value))
    return operations


if __name__ == "__main__":
    main()
