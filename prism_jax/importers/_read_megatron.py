"""Parses the arguments of Megatron-LM: the words of a command, or a `model_config.yaml`."""

import re
import shlex


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


def _flags(text: str) -> dict[str, object]:
    text = re.sub(r"\\\r?\n", " ", text)
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", "", text), posix=True, punctuation_chars="\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: dict[str, object] = {}
    flag, values = "", []
    for word in [*lexer, "--"]:
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
    """The flags under `MODEL_ARGS`, or of the whole file if it has no such section.

    These files are simple: one flag per line, `--num-layers: 32`. Anything nested is not a flag.

    **Raises:**

    A `ValueError` of one clause that names the line.
    """
    found: dict[str, object] = {}
    section, has_section = "", re.search(r"(?m)^MODEL_ARGS:\s*$", text) is not None
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not bare or bare == "---":
            continue
        match = re.fullmatch(r"(\s*)(-{0,2}[A-Za-z][\w.-]*):(?:\s+(.*))?", bare)
        if has_section and not bare.startswith(" "):
            section = match[2] if match else ""
            continue
        if has_section and section != "MODEL_ARGS":
            continue
        if not match:
            raise ValueError(f"line {number} is no flag with its value, as in `--num-layers: 32`")
        value = (match[3] or "").strip()
        quoted = re.fullmatch(r"([\"'])(.*)\1", value)
        value = quoted[2] if quoted else value
        if quoted or value.lower() not in ("true", "false", "null", "~"):
            found[match[2].lstrip("-")] = value
        else:
            found[match[2].lstrip("-")] = {"true": True, "false": False}.get(value.lower())
    if not found:
        raise ValueError("it has no flags under `MODEL_ARGS`")
    return found
