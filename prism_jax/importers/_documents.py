"""Files of other software as tables of flat keys, whatever their format: JSON, YAML, TOML, a shell
script, or arguments as a program prints them. A file is known by its content.
"""

import functools as ft
import itertools as it
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._installed import needed
from .._misc import quoted
from ..data import parse_toml
from ._shell import run_script
from ._shell_words import absent


# What is listed in a file takes time and memory for each; aliases of YAML stand for a part again.
_MOST_KEYS, _DEEPEST = 200_000, 40
_TOO_DEEP = "it cannot be read: it has more keys, or deeper ones, than any configuration has."


class Document(NamedTuple):
    """What a file says.

    **Attributes:**

    - `name`: the name of the file.
    - `kind`: its format: `json`, `yaml`, `toml`, `command`, or `arguments` that were printed.
    - `table`: its tables as they are nested.
    - `keys`: its values by their dotted keys: texts, numbers, truth values, `None`, and lists of
        these.
    - `launcher`: the options of the launcher, such as `torchrun`, by their names without dashes.
    - `wanted`: the files that it reads and that are not at hand.
    - `assigned`: the variables that it assigns, with their words.
    - `where`: what a message calls it.
    """

    name: str
    kind: str
    table: Mapping[str, Any]
    keys: Mapping[str, Any]
    launcher: Mapping[str, Any] = {}
    wanted: Sequence[str] = ()
    assigned: Mapping[str, Sequence[str]] = {}
    where: str = ""


def document(
    name: str,
    text: str,
    outer: Sequence[Mapping[str, str]] = (),
    source: Callable[[str], str | None] = lambda name: None,
) -> Document:
    """Reads a file.

    **Arguments:**

    - `name`: its name; its ending only tells which error is named if no format fits.
    - `text`: its content.
    - `outer`: tables of values of variables that it does not assign.
    - `source`: the text of a script that it reads, by its name.

    **Raises:**

    A `ValueError` of one sentence if it cannot be read.
    """
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    if printed := _printed(text):
        return Document(name, "arguments", printed, printed)
    if text.startswith("#!"):
        return _command(name, text, outer, source)
    suffix, problem = pathlib.PurePath(name).suffix.lower(), None
    for kind, pattern, parse, suffixes in _FORMATS:
        try:
            table = parse(text) if re.search(pattern, text) else None
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        except ValueError as error:
            if suffix in suffixes:
                problem = error
            continue
        if isinstance(table, dict):
            return Document(name, kind, table, _filled(dict(_flat(table)), outer))
        if isinstance(table, list):
            raise ValueError("this is not a table of keys; give a configuration.")
    if problem is None:
        return _command(name, text, outer, source)
    reason = quoted(" ".join(str(problem).split()).rstrip("."), 160)
    if isinstance(problem, json.JSONDecodeError) and not text.rstrip().endswith(("}", "]")):
        reason = "the JSON ends early, as of a download that was cut"
    raise ValueError(f"it cannot be read: {reason}; give another file.")


def _command(
    name: str, text: str, outer: Sequence[Mapping[str, str]], source: Callable[[str], str | None]
) -> Document:
    try:
        script = run_script(text, outer, source)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"it cannot be read: {error}; give another file.") from None
    launcher, keys = options(script.commands, script.variables)
    for line in script.comments:
        if match := re.match(r"#\s*(?:SBATCH|PBS|BSUB|FLUX:)\s+(.*)", line):
            launcher = {**options_of(match[1].split()), **launcher}
    if not keys and not launcher:
        raise ValueError("it has no flags such as `--num-layers 32`.")
    return Document(name, "command", keys, keys, launcher, script.wanted, script.variables)


# A program, after which its own options come.
_PROGRAM = re.compile(r"^(?:[^-=\s]\S*)?\.py$|^[\w.]+\.(?:train|pretrain\w*|cli\.train|main)$")
_LAUNCHERS = re.compile(
    r"(?:^|/)(torchrun|srun|deepspeed|deepy\.py|mpirun|mpiexec|accelerate|sbatch|composer|axolotl"
    r"|llamafactory-cli)$"
)
_SIZES = {"num-layers", "hidden-size", "hybrid-layer-pattern", "encoder-num-layers"}


def options(
    commands: Sequence[Sequence[str]], variables: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of launchers, and those of the program that is launched: of the command with the
    most of them. A script without a command that has any is one that others read, and all lists of
    options in its variables count.
    """
    launcher: dict[str, Any] = {}
    best: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    for command in commands:
        lists = (word.split() if "--" in word else [word] for word in command)
        words = [word for words in lists for word in words]
        launches = any(map(_LAUNCHERS.search, words)) or "torch.distributed" in str(words)
        is_bare = words[0].startswith("-")
        programs = (i for i, word in enumerate(words) if _PROGRAM.search(word))
        at = next(programs, -1 if is_bare and not launches else 0)
        if launches:
            launcher |= options_of(words[: at or len(words)])
        values = options_of(words[at + 1 :])
        if is_bare:  # Arguments alone, on several lines.
            bare |= values
        elif len(values) >= max(1, len(best)):
            best = values
    best = bare if len(bare) > len(best) else best
    listed = [words for words in variables.values() if any("--" in word for word in words)]
    of_variables = options_of(" ".join(it.chain.from_iterable(listed)).split())
    says = [_SIZES & {name.replace("_", "-") for name in values} for values in (best, of_variables)]
    if not best or (says[1] and not says[0]):
        best = {**of_variables, **best}
    if "WORLD_SIZE" in variables and not launcher:
        launcher["world-size"] = variables["WORLD_SIZE"][0]
    return launcher, best


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command, without dashes, each with its words, or `True` if it has none; and
    dotted keys with their values (`model.num_layers=40`), as of Hydra.
    """
    values: dict[str, Any] = {}
    flag = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word) and not re.fullmatch(r"-[a-z][\w.]*[:/].*", word):
            flag, equals, value = word.lstrip("-").partition("=")
            values[flag] = value if equals else True
        elif match := re.match(
            r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)+|[a-z]\w*)=(.*)$", word, re.DOTALL
        ):
            values[match[1]], flag = match[2], ""
        elif flag:
            values[flag] = word if values[flag] is True else f"{values[flag]} {word}"
    return values


# A line such as `  hidden_size ................ 4096`, after what a logger or a launcher puts
# before it. GPT-NeoX says after it whether the value is a default.
_PRINTED = re.compile(
    r"(?:^|[\s:|\]])([A-Za-z]\w*) \.{3,} ?(.*?)(?:\.{3,}(?:updated|default))?\s*$"
)


def _printed(text: str) -> dict[str, Any]:
    """The arguments in a printed block, of which there are at least three."""
    arguments: dict[str, Any] = {}
    for line in text.splitlines():
        if ("...." in line) and (match := _PRINTED.search(line[:2000])):
            arguments.setdefault(match[1], _word(match[2]))
    return arguments if len(arguments) > 2 else {}


def _word(text: str) -> Any:
    return {"True": True, "False": False, "None": None, "": None}.get(text, text)


def _flat(value: Any, prefix: str = "", depth: int = 0, left: list[int] | None = None) -> Iterator:
    """The values of nested tables by their dotted keys, those of `<<` among those beside it."""
    left = [_MOST_KEYS] if left is None else left
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            path = prefix if name == "<<" else f"{prefix}.{name}".lstrip(".")
            yield from _flat(inner, path, depth + 1, left)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{i}" if prefix else str(i), depth + 1, left)
    else:
        left[0] -= len(value) if isinstance(value, list) else 0
        yield prefix, value.strip() if isinstance(value, str) else value


# As of OmegaConf, whose `???` is a value to be given; dots before a name are sections above.
_REFERENCE = re.compile(r"\$\{(?:oc\.env:|env:)?([\w.]+)(?:[:,]-?([^{}]*))?\}")


def _filled(keys: Mapping[str, Any], outer: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The values of all keys, with those of the keys and variables that they name (`${name}`)."""

    @ft.cache
    def filled(key: str, depth: int = 0) -> Any:
        value = keys[key]
        if not isinstance(value, str) or "${" not in value:
            return None if value == "???" else value

        def place(name: str) -> str:
            dots = len(name) - len(name.lstrip("."))
            above = key.rsplit(".", dots)[0] + "." if dots else ""
            return above.lstrip(".") * (key.count(".") >= dots) + name.lstrip(".")

        def named(match: re.Match[str]) -> str:
            name = place(match[1])
            if name in keys and depth < 4:
                text = filled(name, depth + 1)
            else:
                text = next((table[name] for table in outer if name in table), match[2])
            if text is None or isinstance(text, list | dict):
                return absent(name)
            return str(text)[:1000]

        match = _REFERENCE.fullmatch(value)
        if match and place(match[1]) in keys and not isinstance(keys[place(match[1])], str):
            return keys[place(match[1])]
        return _word(_REFERENCE.sub(named, value[:10_000]))

    return {key: filled(key) for key in keys}


def parse_yaml(text: str) -> Any:
    """The content of a YAML file, of plain values alone: truth values, `None` and texts.

    **Raises:**

    A `ValueError` of one clause that names the line.
    """
    yaml = needed("yaml")
    try:
        return yaml.load(text, _loader())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line} is not YAML ({quoted(error.problem or '')})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({quoted(str(error))})") from None


@ft.cache
def _loader() -> Any:
    """Reads all values but truth values and nothing as texts: YAML 1.1 takes `1e-5` for a text, and
    `no` for a truth value. It makes no other objects, as a `SafeLoader`, and no tag does.
    """
    yaml = needed("yaml")
    base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    Loader: Any = type("Loader", (base,), {})
    values = {"true": True, "false": False, "null": None, "~": None, "": None, "none": None}
    tag = "tag:yaml.org,2002:null"
    Loader.add_implicit_resolver(tag, re.compile(r"(?i)(true|false|null|none|~|)$"), None)
    Loader.add_constructor(tag, lambda loader, node: values[node.value.lower()])
    return Loader


# The formats of tables, each with what a text of it has (a script is a text to YAML, and assigns
# numbers as TOML does), what parses it, and the endings of names that are its own.
_FORMATS: tuple[tuple[str, str, Callable[[str], Any], tuple[str, ...]], ...] = (
    ("json", r"\A\s*[{\[]", json.loads, (".json",)),
    ("toml", r"(?m)^\s*\[[\w.\"-]+\]\s*(#.*)?$", parse_toml, (".toml",)),
    ("yaml", r"(?m)^\s*[\"']?[\w.-]+[\"']?\s*:|^\s*\{", parse_yaml, (".yaml", ".yml")),
)
