"""The keys of a job file: their meanings, units, allowed values and defaults; and those of a job
with their values, and whether these are the defaults.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ._job import Job
from ._training import load_software
from ._types import struct_type


# The units of keys by the ends of their names.
_UNITS = {
    "_flop_per_s": "FLOP/s",
    "_bytes_per_s": "bytes/s",
    "_bytes": "bytes",
    "_s": "s",
    "_w": "W",
    "_per_k": "1/K",
    "_k": "K",
    "sequence_length": "tokens",
    "microbatch_size": "sequences",
    "hidden_size": "elements",
    "vocab_size": "tokens",
    "max_positions": "tokens",
}
# Keys that are filled in when a job is loaded, or written by `calibrate`.
LEFT_OUT = ("kernels", "calibrated")


class Key(msgspec.Struct, frozen=True):
    """A key of a job file.

    **Attributes:**

    - `key`: the dotted key; `[]` stands for every item of a list.
    - `allowed`: the allowed values, in words.
    - `default`: the default, as TOML writes it; `None` if the key is required, empty if it may be
        absent.
    - `unit`: the unit of a number, or empty.
    - `about`: the meaning of the key, from the docstring.
    """

    key: str
    allowed: str
    default: str | None
    unit: str
    about: str


def job_keys() -> list[Key]:
    """All keys of a job, its model and its cluster, in the order of the schema."""
    return list(_keys(Job, ""))


def _keys(cls: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    about = _attributes(cls)
    for field in msgspec.structs.fields(cls):
        name = field.encode_name
        if not prefix and name in LEFT_OUT:
            continue
        inner = struct_type(field.type)
        is_list = "tuple" in str(field.type)
        key = f"{prefix}{name}{'[]' if inner and is_list else ''}"
        default = None if field.required else toml_value(field.default)
        yield Key(key, _allowed(field.type), default, unit(name), about.get(name, ""))
        if inner is not None:
            yield from _keys(inner, f"{key}.")


def unit(key: str) -> str:
    """The unit of a key, from its name or that of its table; empty if it has none."""
    names = reversed(key.split("."))
    return next((u for name in names for end, u in _UNITS.items() if name.endswith(end)), "")


def toml_value(value: Any) -> str:
    """A value as TOML writes it; empty for `None`."""
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _attributes(cls: type) -> dict[str, str]:
    """The text on each attribute in a docstring: the items that begin with names in backquotes."""
    text = inspect.cleandoc(cls.__doc__ or "")
    found = {}
    text = re.sub(r"\[(`[^`]+`)\]\[\]", r"\1", text)  # No links to the API.
    for item in re.findall(r"^- (`.*(?:\n {2,}.*)*)", text, re.M):
        names, _, about = " ".join(item.split()).partition(": ")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), about)
    return found


def _allowed(annotation: Any) -> str:
    """A type in words."""
    limits, base = "", annotation
    if typing.get_origin(base) is typing.Annotated:
        base, *metas = typing.get_args(base)
        limits = "".join(_limits(meta) for meta in metas)
    origin, arguments = typing.get_origin(base), typing.get_args(base)
    if origin is Literal:
        return "one of " + ", ".join(map(toml_value, arguments))
    if origin is tuple:
        return f"a list; each item: {_allowed(arguments[0])}"
    if origin is dict:
        return f"a table; each value: {_allowed(arguments[1])}"
    if arguments:  # A union.
        return " or ".join(_allowed(one) for one in arguments if one is not type(None))
    if inspect.isclass(base) and issubclass(base, msgspec.Struct):
        return "a table"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(base, "anything") + limits


def _limits(meta: Any) -> str:
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    told = [
        f"{word} {value:g}"
        for sign, word in signs.items()
        if (value := getattr(meta, sign, None)) is not None and abs(value) < 1e8
    ]
    return f" {', '.join(told)}" if told else ""


class AssumedKey(msgspec.Struct, frozen=True):
    """A key of a job.

    **Attributes:**

    - `key`: the dotted key, with an index for each item of a list.
    - `value`: its value in the job.
    - `unit`: the unit of a number, or empty.
    - `is_default`: whether the value is that of a job without the key.
    - `stack`: the software stack (`training.software`) that sets the key to this value, or empty.
    """

    key: str
    value: Any
    unit: str
    is_default: bool
    stack: str = ""

    @property
    def origin(self) -> str:
        """Where the value is from: `default`, `given`, or the software stack."""
        return self.stack or ("default" if self.is_default else "given")


def assumed_keys(job: Job) -> list[AssumedKey]:
    """All keys of a job, of its model and its cluster."""
    known = {key.key: key for key in job_keys()}
    stack, of_stack = _stack(job)
    table = msgspec.to_builtins(job)
    found = []
    for path, value in _flat({name: table[name] for name in table if name not in LEFT_OUT}):
        # In a table of free names, such as the settings of a module, no key is known.
        key = known.get(re.sub(r"\[\d+\]", "[]", path), Key(path, "", None, unit(path), ""))
        is_default = key.default is not None and toml_value(value) == key.default
        is_of_stack = path in of_stack and of_stack[path] == value
        found.append(AssumedKey(path, value, key.unit, is_default, stack if is_of_stack else ""))
    return found


def _stack(job: Job) -> tuple[str, dict[str, Any]]:
    """The software stack of a job, and the keys that it sets with their values."""
    name = "" if job.training is None else job.training.software or ""
    try:
        switches = load_software(name).training if name else {}
    except ValueError:  # The stack may be a file beside the job's file, whose path is unknown here.
        switches = {}
    return name, {f"training.{key}": value for key, value in switches.items()}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}[{i}]")
    else:
        yield prefix, value
