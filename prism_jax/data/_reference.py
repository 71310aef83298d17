"""The keys of a job file: their meanings, units, allowed values and defaults; and those of a job
with their values, and where these are from.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from .._misc import quoted
from ._derived import DERIVED, derived_keys, without_keys
from ._given import dotted_keys
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
    "global_batch_size": "sequences",
    "hidden_size": "elements",
    "vocab_size": "tokens",
    "max_positions": "tokens",
}
# Fields that are filled in when a job is loaded, or written by `calibrate`.
LEFT_OUT = ("kernels", "calibrated", "given")


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
    listed, texts = [], {}
    for key, field, cls in _fields(Job):
        if key.partition(".")[0] in LEFT_OUT:
            continue
        if cls not in texts:
            texts[cls] = _attributes(cls)
        name, default = field.encode_name, None if field.required else toml_value(field.default)
        text = texts[cls].get(name, "")
        listed.append(Key(key, _allowed(field.type), default, unit(name), text))
    return listed


def _fields(
    cls: type[msgspec.Struct], prefix: str = ""
) -> Iterator[tuple[str, msgspec.structs.FieldInfo, type[msgspec.Struct]]]:
    """The fields of a struct and of those within it, each with its dotted key and its struct."""
    for field in msgspec.structs.fields(cls):
        inner = struct_type(field.type)
        is_list = "tuple" in str(field.type)
        key = f"{prefix}{field.encode_name}{'[]' if inner and is_list else ''}"
        yield key, field, cls
        if inner is not None:
            yield from _fields(inner, f"{key}.")


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a field, as a file would have it; `NODEFAULT` if it is required."""
    has_factory = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if has_factory else field.default
    return value if value is msgspec.NODEFAULT else msgspec.to_builtins(value)


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
    texts = {}
    text = re.sub(r"\[(`[^`]+`)\]\[\]", r"\1", text)  # No links to the API.
    for item in re.findall(r"^- (`.*(?:\n {2,}.*)*)", text, re.M):
        names, _, text_of = " ".join(item.split()).partition(": ")
        texts |= dict.fromkeys(re.findall(r"`(\w+)`", names), text_of)
    return texts


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
        return " or ".join(
            _allowed(argument) for argument in arguments if argument is not type(None)
        )
    if inspect.isclass(base) and issubclass(base, msgspec.Struct):
        return "a table"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(base, "anything") + limits


def _limits(meta: Any) -> str:
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = [
        f"{word} {value:g}"
        for sign, word in signs.items()
        if (value := getattr(meta, sign, None)) is not None and abs(value) < 1e8
    ]
    return f" {', '.join(limits)}" if limits else ""


_Origin = Literal["given", "derived", "stack", "default"]


class AssumedKey(msgspec.Struct, frozen=True):
    """A key of a job.

    **Attributes:**

    - `key`: the dotted key, with an index for each item of a list.
    - `value`: its value in the job.
    - `unit`: the unit of a number, or empty.
    - `is_default`: whether the value is the default of the key.
    - `origin`: where the value is from: `given`, by the job's file, an override or a change in
        Python; or else `derived` from other keys, the software `stack`, or the `default` of the
        key.
    - `stack`: the software stack (`training.software`) that the value is from, or empty.
    """

    key: str
    value: Any
    unit: str
    is_default: bool
    origin: _Origin
    stack: str = ""

    @property
    def where_from(self) -> str:
        """The origin, with the name of a stack."""
        return f"stack {quoted(self.stack)}" if self.stack else self.origin


def assumed_keys(job: Job) -> list[AssumedKey]:
    """All keys of a job, of its model and its cluster."""
    stack = "" if job.training is None else job.training.software or ""
    return [
        AssumedKey(key, value, unit(key), is_default, origin, stack if origin == "stack" else "")
        for key, value, is_default, origin in _origins(job, job.name)
        if key.partition(".")[0] not in LEFT_OUT
    ]


def given_keys(job: Job, name: str) -> dict[str, Any]:
    """The table of a job, without `kernels`, with only the keys that were given, or whose values
    would be others without them.

    **Arguments:**

    - `name`: the name that a job has if its table has none.

    **Raises:**

    A `ValueError` for a key without a value that the software stack sets, because TOML has no word
    for it.
    """
    chosen = {key: value for key, value, _, origin in _origins(job, name) if origin == "given"}
    for key, value in chosen.items():
        if value is None:
            raise ValueError(
                f"`{key}` is `None`, but the job's software stack sets it, and a file cannot say "
                "`None`; give it a value, or the job another `training.software`."
            )

    def only(value: Any, prefix: str) -> Any:
        if isinstance(value, dict) and value:
            inner = {key: only(item, f"{prefix}.{key}".lstrip(".")) for key, item in value.items()}
            return {key: item for key, item in inner.items() if item is not None} or None
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            return [only(item, f"{prefix}[{i}]") or {} for i, item in enumerate(value)]
        return chosen.get(prefix)

    table = only(_table(job), "")
    return table if "world_size" in table else {"layout": {}} | table


def _origins(job: Job, name: str) -> Iterator[tuple[str, Any, bool, _Origin]]:
    """The keys of a job: each with its value, whether this is its default, and where it is from."""
    defaults = {key.replace("[]", ""): _default(field) for key, field, _ in _fields(Job)}
    defaults["name"] = name
    if job.cluster is not None and len(links := job.cluster.links) > 1:
        # A network joins all devices, for any number of nodes; a single link may be that of a node.
        defaults[f"cluster.links[{len(links) - 1}].group"] = job.cluster.num_devices
    software = None if job.training is None else job.training.software
    switches = load_software(software).training if software else {}
    stack = {f"training.{key}": _immutable(value) for key, value in switches.items()}
    table = _table(job)
    left_out = tuple(key for key in DERIVED if key not in job.given.keys)
    try:
        derived = derived_keys(without_keys(table, left_out))
    except ValueError:  # As of a job that was changed in Python.
        derived = {}
    for key, value in dotted_keys(table):
        # In a table of free names, such as the settings of a module, no key has a default.
        default = defaults.get(key, defaults.get(re.sub(r"\[\d+\]", "", key), msgspec.NODEFAULT))
        is_given = key in job.given.keys and value is not None
        if not is_given and key in derived and value == derived[key]:
            origin = "derived"
        elif is_given or value != stack.get(key, default):
            origin = "given"
        else:
            origin = "stack" if key in stack else "default"
        yield key, value, value == default, origin


def _immutable(value: Any) -> Any:
    return tuple(map(_immutable, value)) if isinstance(value, list) else value


def _table(job: Job) -> dict[str, Any]:
    """The table of a job, as a file could have it."""
    table = msgspec.to_builtins(job)
    return {key: value for key, value in table.items() if key not in ("kernels", "given")}
