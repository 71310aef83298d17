"""Overrides of keys of a job, such as `"layout.dp=64"`."""

import math
import tomllib
from typing import Any

import msgspec

from .._misc import quoted, unknown_name
from ._job import Job
from ._kernels import SHARED, Kernels, Variation
from ._read import parse_toml, struct_type
from ._variations import replace_variations


class Override(msgspec.Struct, frozen=True):
    """A dotted key with its new value.

    **Attributes:**

    - `text`: the override as it was given.
    - `keys`: the parts of the key.
    - `value`: the value.
    """

    text: str
    keys: tuple[str, ...]
    value: Any

    @property
    def key(self) -> str:
        return ".".join(self.keys)

    def __str__(self) -> str:
        return quoted(self.text)


def parse_override(text: str) -> Override:
    """Splits `"key.of.something=value"`. The value is TOML; a bare word is a string.

    **Raises:**

    A `ValueError` if the key or the value is missing.
    """
    key, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    value = value.strip()
    if not equals or not value or not all(keys):
        raise ValueError(
            f"override `{quoted(text)}`: it is not a key and a value; write it as `layout.dp=64`."
        )
    try:
        parsed = parse_toml(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": value}
    except ValueError as error:
        raise ValueError(f"override `{quoted(text)}`: {error}; give another value.") from None
    override = Override(text, keys, parsed["value"] if len(parsed) == 1 else value)
    if isinstance(override.value, dict):
        raise ValueError(
            f"override `{override}`: the value is a table; set one of its keys, as in "
            "`layout.dp=64`."
        )
    return override


def apply_override(raw: dict[str, Any], override: Override) -> str:
    """Sets one key in the table of a job, in place.

    **Returns:**

    The key, in which the name of an item of a list is replaced by its number, as in
    `cluster.links[0].group`.

    **Raises:**

    A `ValueError` if jobs have no such key.
    """
    table: Any = raw
    cls: type[msgspec.Struct] | None = Job
    seen = path = ""
    for depth, key in enumerate(override.keys):
        last = depth == len(override.keys) - 1
        if isinstance(table, list):
            tables = [(i, item) for i, item in enumerate(table) if isinstance(item, dict)]
            names = {str(item["name"]): i for i, item in tables if "name" in item}
            if key not in names:
                _unknown(override, seen, key, names)
            path = f"{path[:-1]}[{names[key]}]."
            table, seen = table[names[key]], f"{seen}{key}."
            if last:
                _no_table(override)
            continue
        known = _known_keys(table, cls)
        # The module itself checks its keys later.
        of_module = depth == 3 and override.keys[:2] == ("model", "modules")
        if key not in known and not (of_module and last):
            _unknown(override, seen, key, known)
        if last:
            table[key] = override.value
            return f"{path}{key}"
        cls = struct_type(known[key])
        if key not in table and cls is not None:
            table[key] = {}
        table, seen, path = table.get(key), f"{seen}{key}.", f"{path}{key}."
        if not isinstance(table, dict | list):
            raise ValueError(
                f"override `{override}`: `{quoted(seen[:-1])}` is a value and has no keys of its "
                "own; set it, or another key."
            )
    raise AssertionError(override)


def apply_kernel_override(kernels: Kernels, override: Override) -> Kernels:
    """Sets one parameter of variability: `kernels.<kind or shared component>.<parameter>`; or, with
    `kernels.rank=power`, the law of GPUs to that of their device's power.

    **Raises:**

    A `ValueError` if there is no such kind or parameter, or if the value is not a number.
    """
    keys, text, value = override.keys, str(override), override.value
    if keys == ("kernels", "rank") and value == "power":
        law = Variation("", "rank", "power", {}, f"override {text}")
        return msgspec.structs.replace(
            kernels, variability=replace_variations(kernels.variability, [law])
        )
    component = "residual"
    if len(keys) == 4 and keys[2] in ("residual", "stall") and keys[1] not in SHARED:
        component, keys = keys[2], (keys[0], keys[1], keys[3])
    if len(keys) != 3:
        raise ValueError(
            f"override `{text}`: write `kernels.<kind>.<parameter>=<number>`, as in "
            "`kernels.all_gather.sigma=0.1`, or `kernels.<kind>.stall.<parameter>=<number>`."
        )
    _, name, parameter = keys
    found = [
        i
        for i, v in enumerate(kernels.variability)
        if (v.component == name if name in SHARED else (v.kernel, v.component) == (name, component))
    ]
    if not found and name in SHARED:
        raise ValueError(
            f"override `{text}`: the kernel tables have no law of `{name}` that could be changed; "
            "add a row to their `variability.csv`, or to the job's `[calibrated]`."
        )
    if not found:
        names = {v.kernel for v in kernels.variability if v.component == component}
        if component == "residual":
            names |= {v.component for v in kernels.variability if v.component in SHARED}
        raise ValueError(f"override `{text}`: {unknown_name('kind of kernel', name, names)}")
    rows = list(kernels.variability)
    old: Variation = rows[found[0]]
    if not old.parameters:
        raise ValueError(
            f"override `{text}`: `{name}` is {old.family} here and has no parameters to set; "
            "choose another family in the table of variability."
        )
    if parameter not in old.parameters:
        sentence = unknown_name(f"parameter of `{name}`", parameter, old.parameters)
        raise ValueError(f"override `{text}`: {sentence}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"override `{text}`: the value is {quoted(repr(value))}, but must be a number."
        )
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"override `{text}`: the value is {value}, but must be finite and not negative."
        )
    parameters = {**old.parameters, parameter: float(value)}
    rows[found[0]] = msgspec.structs.replace(old, parameters=parameters, source=f"override {text}")
    return msgspec.structs.replace(kernels, variability=tuple(rows))


def _known_keys(table: dict[str, Any], cls: type[msgspec.Struct] | None) -> dict[str, Any]:
    if cls is None:
        return dict.fromkeys(table, Any)
    return {f.encode_name: f.type for f in msgspec.structs.fields(cls)}


def _unknown(override: Override, seen: str, key: str, known: Any) -> None:
    sentence = unknown_name("key", f"{seen}{key}", (f"{seen}{name}" for name in known))
    raise ValueError(f"override `{override}`: {sentence}")


def _no_table(override: Override) -> None:
    raise ValueError(
        f"override `{override}`: `{quoted(override.key)}` is a table; set one of its keys."
    )
