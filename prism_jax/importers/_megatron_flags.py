"""The flags of Megatron-LM: what each means for a job (see `megatron_flags.toml`), and those of a
command line or of a YAML file.
"""

import functools as ft
import itertools as it
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .._misc import quoted
from ._problems import Reader, is_off


class Flag(NamedTuple):
    """What a flag means.

    **Attributes:**

    - `kind`: its table in `megatron_flags.toml`.
    - `what`: the key of a job that it sets, the flag that it stands for, or what it costs.
    """

    kind: str
    what: str


@ft.cache
def tables() -> dict[str, Any]:
    """The tables of `megatron_flags.toml`."""
    text = pathlib.Path(__file__).with_name("megatron_flags.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@ft.cache
def known_flags() -> dict[str, Flag]:
    """All known flags, without dashes before them. A name that ends in `*` is a beginning."""
    found = {}
    for kind in ("sets", "no_effect", "noted", "refused", "refused_in_fp8"):
        for what, names in tables()[kind].items():
            found |= dict.fromkeys(names.split(), Flag(kind, what))
    for kind in ("same", "opposite"):
        found |= {name: Flag(kind, other) for name, other in tables()[kind].items()}
    return found


def _flag_of(name: str) -> Flag | None:
    """The meaning of a flag, if it is known."""
    begins = (f"{one}*" for one in _beginnings() if name.startswith(one))
    return known_flags().get(name) or known_flags().get(next(begins, ""))


@ft.cache
def _beginnings() -> tuple[str, ...]:
    return tuple(name[:-1] for name in known_flags() if name.endswith("*"))


def usual_names(arguments: Mapping[str, object]) -> dict[str, object]:
    """The flags by their names in `megatron_flags.toml`: with dashes, by one of several names, and
    those that switch another flag off as that flag.
    """
    found: dict[str, object] = {}
    for key, value in arguments.items():
        name, same = _usual_name(key.lstrip("-").replace("_", "-").lower())
        found[name] = value if same or value is None else is_off(value)
    return found


def _usual_name(name: str) -> tuple[str, bool]:
    """The usual name of a flag, and whether it means the same or the opposite."""
    flag = _flag_of(name)
    if flag is not None:
        stands = flag.kind in ("same", "opposite")
        return (flag.what, flag.kind == "same") if stands else (name, True)
    for word in ("no-", "disable-"):
        for other in (name.removeprefix(word), word + name):
            if other in known_flags():
                return other, False
    return name, True


def stack_of(read: Reader) -> tuple[str, str]:
    """The software stack of Megatron-LM at the time of the flags, and a sentence that says why."""
    *older, newest = tables()["stacks"].items()
    for stack, names in older:
        for flag in names.split():
            if flag in read:
                return stack, (
                    f"Newer versions of Megatron-LM have no flag `{flag}`, so the software stack "
                    f"is `{stack}`; `--software` gives another."
                )
    return newest[0], (
        "No flag is one that only older versions of Megatron-LM have, so the software stack is the "
        f"newest of Megatron-LM, `{newest[0]}`; `--software` gives another."
    )


# Scripts of other programs have more flags than that.
_MOST_UNKNOWN = 100
# Of the optimizer, on which everything else counts.
_IN_FLOAT32 = ("main-params-dtype", "megatron-fsdp-main-params-dtype")


def check_flags(read: Reader, dtype: str) -> None:
    """Adds all unread flags to the problems that a job with matrix multiplications in `dtype`
    cannot express, and notes those that are not known. Unknown flags are problems if they are
    almost a known one, and with `read.strict`.
    """
    for flag in _IN_FLOAT32:
        read.choice(flag, "fp32", "auto")
    refusals = ("refused", "refused_in_fp8") if dtype in ("fp8", "mxfp8", "fp4") else ("refused",)
    unknown: list[str] = []
    for key in read.unread():
        kind, what = _flag_of(key) or ("unknown", "")
        if kind == "unknown":
            unknown.append(key)
        elif kind in refusals and not is_off(read.get(key)):
            read.problems.append(f"`{key}` ({what})")
        elif kind == "noted" and not is_off(read.get(key)):
            read.notes.append(f"The flag `{key}` {what}.")
    if len(unknown) > _MOST_UNKNOWN:
        read.problems.append(f"{len(unknown)} flags that are not known here, as `{unknown[0]}`")
        return
    for key in unknown:
        near = _near(key)
        if near:
            read.problems.append(f"`{key}`, a flag that is not known here (did you mean `{near}`?)")
        elif read.strict:
            read.problems.append(f"`{key}`, a flag that is not known here")
        else:
            read.notes.append(f"The flag `{quoted(key)}` is not known here, so it is left out.")


def _near(name: str) -> str:
    """The known flag that was probably meant: one that differs by a slip of the finger, or a key of
    the job whose name has more words.
    """
    words, known = {*name.split("-")}, known_flags()
    slips = (one for one in known if _is_slip(name, one))
    sets = [one for one, flag in known.items() if flag.kind == "sets" and len(words) > 1]
    return next(slips, "") or next((one for one in sets if words < {*one.split("-")}), "")


def _is_slip(name: str, known: str) -> bool:
    """Whether one letter differs, two letters are swapped, or at most two are missing or added."""
    if abs(len(name) - len(known)) > 2 or len(name) < 4:
        return False
    pair = [name, known]
    for _ in range(2):  # Without the letters that both begin with, and those that both end with.
        alike = it.takewhile(lambda letters: letters[0] == letters[1], zip(*pair, strict=False))
        same = sum(1 for _ in alike)
        pair = [word[same:][::-1] for word in pair]
    a, b = pair
    return len(a) + len(b) <= 2 or (len(a) == 2 and a == b[::-1])


def parse_command(text: str) -> dict[str, object]:
    """The flags of a command line, each with its words, or `True` if it has none.

    The value of a flag ends at the end of the line, unless this is a backslash. Lists of flags
    (`ARGS=(...)`) and strings of flags (`ARGS="..."`) count as used.

    **Raises:**

    A `ValueError` of one clause if it cannot be split.
    """
    if not (found := _flags(text)):
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
