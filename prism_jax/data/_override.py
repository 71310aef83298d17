"""Overrides of keys of a job, such as `"layout.dp=64"`."""

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .._misc import quoted, unknown_name
from ._job import Job
from ._kernels import Kernels
from ._model import load_architecture
from ._read import located, parse_toml
from ._types import NeverValidError, struct_type, types_of
from ._variations import SHARED, STEP_EXCESS, Variation, replace_variations


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
    with located(f"override `{quoted(text)}`"):
        if not equals or not value or not all(keys):
            raise ValueError("it is not a key and a value; write it as `layout.dp=64`.")
        try:
            parsed = parse_toml(f"value = {value}")
        except tomllib.TOMLDecodeError:
            parsed = {"value": value}
        except ValueError as error:
            raise ValueError(f"{error}; give another value.") from None
        override = Override(text, keys, parsed["value"] if len(parsed) == 1 else value)
        if isinstance(override.value, dict):
            raise ValueError("the value is a table; set one of its keys, as in `layout.dp=64`.")
    return override


def overrides_of(overrides: str | Iterable[str] | Mapping[str, Any]) -> list[Override]:
    """Overrides, given as texts or as a value of each dotted key.

    **Raises:**

    A `ValueError` for a text without a key or a value, and for what is no value of a key.
    """
    if not isinstance(overrides, Mapping):
        is_single = isinstance(overrides, str) or not isinstance(overrides, Iterable)
        texts: list[Any] = [overrides] if is_single else [*overrides]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"overrides were given as {quoted(repr(overrides))}; give texts such as "
                '`"layout.dp=64"`, or a value for each key.'
            )
        return [parse_override(text) for text in texts]
    return [
        Override(f"{key}={quoted(value)}", tuple(str(key).split(".")), _plain(key, value))
        for key, value in overrides.items()
    ]


def _plain(key: str, value: Any) -> Any:
    """A value as TOML has it."""

    def of_other(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, np.generic):
            return value.item()
        raise ValueError(
            f"`{quoted(key)}` was given a `{type(value).__name__}`, {quoted(value)}; give a "
            "number, a text, or what a job has there."
        )

    return msgspec.to_builtins(value, enc_hook=of_other)


def apply_override(raw: dict[str, Any], override: Override) -> str:
    """Sets one key in the table of a job, in place.

    **Returns:**

    The key, in which the name of an item of a list is replaced by its number, as in
    `cluster.links[0].group`.

    **Raises:**

    A `ValueError` if jobs have no such key.
    """
    table: Any = raw
    annotation: Any = Job
    path, last = "", len(override.keys) - 1
    for depth, key in enumerate(override.keys):
        seen = ".".join(override.keys[: depth + 1])
        if isinstance(table, list):
            named = [(i, item) for i, item in enumerate(table) if isinstance(item, dict)]
            places = {str(item["name"]): i for i, item in named if "name" in item}
        else:
            places = types_of(struct_type(annotation)) or dict.fromkeys(table, Any)
        # A module itself checks its keys later.
        is_of_module = depth == last == 3 and override.keys[:2] == ("model", "modules")
        if key not in places and not (is_of_module and isinstance(table, dict)):
            before = seen.removesuffix(key)
            raise ValueError(unknown_name("key", seen, (f"{before}{name}" for name in places)))
        if isinstance(table, list):
            if depth == last:
                raise ValueError(f"`{quoted(seen)}` is a table; set one of its keys.")
            table, path = table[places[key]], f"{path[:-1]}[{places[key]}]."
            continue
        if depth == last:
            table[key] = override.value
            if override.value is None:  # As if it had not been given.
                del table[key]
            return f"{path}{key}"
        annotation = places[key]
        if struct_type(annotation) is not None:
            table.setdefault(key, {})
        table, path = table.get(key), f"{path}{key}."
        if not isinstance(table, dict | list):
            raise ValueError(
                f"`{quoted(seen)}` is a value and has no keys of its own; set it, or another key."
            )
    raise AssertionError(override)


def apply_kernel_override(kernels: Kernels, override: Override) -> Kernels:
    """Sets one parameter of variability: `kernels.<kind or shared component>.<parameter>`; or, with
    `kernels.rank=power`, the law of GPUs to that of their device's power.

    **Raises:**

    A `ValueError` if there is no such kind or parameter, or if the value is not a number.
    """
    with located(f"override `{override}`"):
        laws = _changed_laws(kernels, override)
    return msgspec.structs.replace(kernels, variability=laws)


def _changed_laws(kernels: Kernels, override: Override) -> tuple[Variation, ...]:
    laws, source, value = kernels.variability, f"override {override}", override.value
    _, *keys = override.keys
    if keys == ["rank"] and value == "power":
        return replace_variations(laws, [Variation("", "rank", "power", {}, source)])
    component = "residual"
    if len(keys) == 3 and keys[1] in ("residual", "stall") and keys[0] not in SHARED:
        component = keys.pop(1)
    if len(keys) != 2:
        raise ValueError(
            "write `kernels.<kind>.<parameter>=<number>`, as in `kernels.all_gather.sigma=0.1`, or "
            "`kernels.<kind>.stall.<parameter>=<number>`."
        )
    name, parameter = keys
    of_all = name in SHARED
    law = kernels.find_variation(name) if of_all else kernels.find_variation(component, name)
    if law is None and of_all:
        raise ValueError(
            f"the kernel tables have no law of `{name}` that could be changed; add a row to their "
            "`variability.csv`, or to the job's `[calibrated]`."
        )
    if law is None:
        names = {variation.kernel for variation in laws if variation.component == component}
        if component == "residual":
            names |= {variation.component for variation in laws if variation.component in SHARED}
        raise ValueError(unknown_name("kind of kernel", name, names))
    if not law.parameters:
        raise ValueError(
            f"`{name}` is {law.family} here and has no parameters to set; choose another family in "
            "the table of variability."
        )
    if parameter not in law.parameters:
        raise ValueError(unknown_name(f"parameter of `{name}`", parameter, law.parameters))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NeverValidError(f"the value is {quoted(repr(value))}, but must be a number.")
    if not (math.isfinite(value) and value >= 0):
        raise NeverValidError(f"the value is {value}, but must be finite and not negative.")
    parameters = {**law.parameters, parameter: float(value)}
    if parameter == "slowdown":  # It is what was asked for, whatever it adds to the step.
        parameters.pop(STEP_EXCESS, None)
    if parameters == law.parameters:
        return laws
    changed = msgspec.structs.replace(law, parameters=parameters, source=source)
    return tuple(changed if variation is law else variation for variation in laws)


def put_layers(raw: dict[str, Any], overrides: Sequence[Override]) -> list[Override]:
    """Replaces the layers of a job's model by those of the file that an override names, if one
    does, in place. Returns the other overrides, which change what the file gives.

    The settings of the job's modules that the new layers do not name stay, because `first` and
    `last` may need them.
    """
    of_layers = [override for override in overrides if override.keys[0] == "layers"]
    if of_layers:
        with located(f"override `{of_layers[-1]}`"):
            _put(raw, of_layers)
    return [override for override in overrides if override.keys[0] != "layers"]


def _put(raw: dict[str, Any], overrides: Sequence[Override]) -> None:
    *earlier, override = overrides
    if earlier:
        raise ValueError(f"`{earlier[0]}` was given, too; give the file of layers once.")
    path = override.value
    if override.keys != ("layers",):
        raise ValueError(
            "`layers` names a file and has no keys of its own; give `layers=FILE`, or set a key of "
            "the model, such as `model.num_heads`."
        )
    if not isinstance(path, str) or not path:
        raise ValueError("it does not name a file; give that of an architecture: `layers=FILE`.")
    if not isinstance(raw.get("model"), dict):
        raise ValueError("the job has no model; leave `layers` out.")
    architecture = load_architecture(path)
    layers = msgspec.to_builtins(architecture.layers)
    depth = sum(layer.repeat for layer in architecture.layers)
    named = {name for layer in architecture.layers for name in layer.modules}
    modules_before = raw["model"].get("modules")
    kept = modules_before.items() if isinstance(modules_before, dict) else ()
    modules = {name: table for name, table in kept if name not in named} | architecture.modules
    raw["model"] |= {"layers": layers, "modules": modules, "num_layers": depth}
