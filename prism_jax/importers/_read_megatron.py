"""Reads the arguments of Megatron-LM: a command line, or a YAML file."""

import functools as ft
import re
from collections.abc import Iterator
from typing import Any

from .._misc import quoted


def parse_command(text: str) -> dict[str, object]:
    """The flags of a command line, each with its words, or `True` if it has none.

    The value of a flag ends at the end of the line, unless this is a backslash. Lists of flags
    (`ARGS=(...)`) and strings of flags (`ARGS="..."`) count as used.

    **Raises:**

    A `ValueError` of one clause if it cannot be split.
    """
    found = _flags(text)
    if not found:
        raise ValueError("it has no flags such as `--num-layers 32`")
    return found


# Blanks (a comment, and the end of a line after a backslash, too), ends of lines, words with their
# quoted parts, and what is none of these: a quotation mark or a backslash at the end. No backslash
# continues a comment. Nothing is tried twice, so that a word may be as long as a file.
_TOKEN = re.compile(
    r"""((?:[^\S\n]|\\\n)++|\#[^\n]*+)|(\n+)"""
    r"""|((?:[^\s"'\\]++|"(?:[^"\\]++|\\.)*+"|'[^']*+'|\\.)++)|(.)""",
    re.DOTALL,
)
_PART = re.compile(r"""'([^']*+)'|"((?:[^"\\]++|\\.)*+)"|\\(.)""", re.DOTALL)


def _words(text: str) -> Iterator[str]:
    """The words of a command as a shell reads them, and the ends of its lines."""
    for match in _TOKEN.finditer(text):
        _, line, word, rest = match.groups()
        if rest:
            raise ValueError(f"a `{rest}` is not closed")
        if line:
            yield line
        elif word:
            yield _PART.sub(_unquoted, word)


def _unquoted(part: re.Match[str]) -> str:
    single, double, escaped = part.groups()
    if double is not None:
        return re.sub(r'\\(?:\n|(["\\$`]))', r"\1", double)
    return escaped.strip("\n") if single is None else single


def _flags(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    flag, values = "", []
    for word in (*_words(text.replace("\r\n", "\n")), "--"):
        named = re.match(r"\w+\+?=(\(?)\s*(?=--)", word)
        word = word[named.end() :] if named else word
        if named and not named[1]:
            found |= _flags(word)
            continue
        # So does the end of a list.
        ends = word.isspace() or word.count(")") > word.count("(")
        word = word.rstrip(")\n") if ends else word
        if word.startswith("--"):
            if flag:
                found[flag] = " ".join(values) if values else True
            flag, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
        elif word:
            values.append(word)
        if ends and flag:
            found[flag] = " ".join(values) if values else True
            flag, values = "", []
    return found


def parse_model_config(text: str) -> dict[str, object]:
    """The flags under `MODEL_ARGS`, or of the whole YAML file if it has no such section, as texts,
    truth values or `None`. Anything nested is not a flag.

    **Raises:**

    A `ValueError` of one clause that names the line.
    """
    import yaml

    loader = _loader()
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            raise ValueError("it has aliases (`*name`), and only plain values are read")
        found = yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line} is not YAML ({quoted(error.problem or '')})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is not YAML ({quoted(str(error))})") from None
    flags = found.get("MODEL_ARGS", found) if isinstance(found, dict) else found
    if not isinstance(flags, dict) or not flags:
        raise ValueError("it has no flags with values, as in `--num-layers: 32`")
    return {
        str(flag).lstrip("-"): _plain(value)
        for flag, value in flags.items()
        if not isinstance(value, dict)
    }


def _plain(value: Any) -> Any:
    """A value as a command line would have it."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return value.strip() if isinstance(value, str) else value


@ft.cache
def _loader() -> Any:
    """Reads all values but truth values and nothing as texts: YAML 1.1 takes `1e-5` for a text, and
    `no` for a truth value.
    """
    import yaml

    base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    Loader: Any = type("Loader", (base,), {})
    values = {"true": True, "false": False, "null": None, "~": None, "": None}
    tag = "tag:yaml.org,2002:null"
    Loader.add_implicit_resolver(tag, re.compile(r"(?i)(true|false|null|~|)$"), None)
    Loader.add_constructor(tag, lambda loader, node: values[node.value.lower()])
    return Loader
