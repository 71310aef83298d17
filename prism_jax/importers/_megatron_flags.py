"""The flags of Megatron-LM, and what other software says in their terms."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ._documents import Document
from ._frameworks import Arguments, framework, translate
from ._problems import Reader


def tables() -> Mapping[str, Any]:
    """The table of Megatron-LM."""
    return framework("megatron").table


def megatron_reader(arguments: Mapping[str, object], *, strict: bool = False) -> Reader:
    """Reads flags of Megatron-LM, by any of their names; see `Reader` for `strict`."""
    given = Document("arguments", "command", arguments, arguments)
    return reader_of(translate([(given, framework("megatron"))], strict=strict), strict)


def reader_of(arguments: Arguments, strict: bool = False, replaced: Collection[str] = ()) -> Reader:
    """Reads what files say by the flags of Megatron-LM; problems have the names in the files."""
    names = {flag: key for flag, (key, _) in arguments.origins.items() if key}
    problems = arguments.problems
    return Reader(arguments.flags, strict=strict, problems=problems, names=names, replaced=replaced)


def stack_of(table: Mapping[str, Any], names: Iterable[str]) -> tuple[str, str]:
    """The software stack of a framework with several, at the time of the keys of its files, and a
    sentence that says why.
    """
    title, word = table["title"], "flag" if "sets" in table else "key"
    given = {name.lstrip("-").replace("_", "-").lower() for name in names}
    *older, newest = table["stacks"].items()
    for stack, keys in older:
        for key in keys.split():
            if key in given:
                return stack, (
                    f"Newer versions of {title} have no {word} `{key}`, so the software stack is "
                    f"`{stack}`; `--software` gives another."
                )
    return newest[0], (
        f"No {word} is one that only older versions of {title} have, so the software stack is the "
        f"newest of {title}, `{newest[0]}`; `--software` gives another."
    )
