"""Numbers and texts that a file may hold, and tables that are converted to structs of them, with an
error of one sentence for each mistake. Numbers are finite: NaN and infinity fail the bounds.
"""

import functools as ft
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from .._misc import MOST_QUOTED, quoted, unknown_name
from ._derived import FOLLOW
from ._given import Given


_T = TypeVar("_T", bound=msgspec.Struct)

Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]
# More layers than any model has; each takes memory here.
MOST_LAYERS = 10**5
Layers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
# Quotients of any two of these are finite.
Positive: TypeAlias = Annotated[float, Meta(ge=1e-30, lt=1e30)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0, lt=1e30)]
# A limit may be infinite.
PositiveOrInfinite: TypeAlias = Annotated[float, Meta(gt=0)]
AtLeastOne: TypeAlias = Annotated[float, Meta(ge=1, lt=1e30)]
Watts: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e6)]
Kelvin: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e6, le=1e6)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
# Texts that messages and tables show: short, on one line, without characters that control a
# terminal (C0, C1), are not seen, or turn the direction of writing. (`$` would let a line break be
# the last.)
_ONE_LINE = (
    r"\A[^\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    r"\ud800-\udfff]*\Z"
)
Label: TypeAlias = Annotated[str, Meta(max_length=80, pattern=_ONE_LINE)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=80, pattern=_ONE_LINE)]
# The path of a file.
FileName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096, pattern=_ONE_LINE)]


class NeverValidError(ValueError):
    """A key has a value that it cannot have, whatever the other keys are."""


def check_keys(
    raw: dict[str, Any], cls: type[msgspec.Struct], where: Callable[[str], str], prefix: str = ""
) -> None:
    """Raises if `raw` has a key that `cls` does not have. The message names similar keys."""
    types = types_of(cls)
    for key, value in raw.items():
        if key not in types:
            sentence = unknown_name("key", f"{prefix}{key}", (f"{prefix}{k}" for k in types))
            raise ValueError(f"{where(prefix + key)}: {sentence}")
        if (inner := struct_type(types[key])) is None:
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, item in items:
            if isinstance(item, dict):
                place = key if i is None else f"{key}[{i}]"
                check_keys(item, inner, where, f"{prefix}{place}.")


def convert(raw: dict[str, Any], cls: type[_T], where: Callable[[str], str]) -> _T:
    """Converts a table to `cls`.

    **Arguments:**

    - `raw`: the table.
    - `cls`: the class to convert it to.
    - `where`: returns the origin of a dotted key, such as the path of its file.

    **Raises:**

    A `ValueError` of one sentence that names the origin and the key.
    """
    check_keys(raw, cls, where)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        key, problem = explain(raw, error)
        annotation = _type_of(cls, key)
        choices = _literals(annotation) if "enum" in problem else ()
        allowed = f"; give one of {', '.join(map(repr, choices))}" if choices else ""
        for source, keys in FOLLOW.items() if "is missing" in problem else ():
            if f"{keys[0]}.".startswith(f"{key}."):
                allowed = f", or `{source}`, from which it follows"
        if "expected a table" in problem and (keys := [*types_of(struct_type(annotation))]):
            allowed = f"; set one of its keys, such as `{key}.{keys[0]}`"
        kind = ValueError if "is missing" in problem else NeverValidError
        raise kind(f"{where(key)}: the key `{key}` {problem}{allowed}.") from None


@ft.cache
def types_of(cls: type[msgspec.Struct] | None) -> dict[str, Any]:
    """The types of the keys that a table of a struct may have; none for `None`."""
    fields = msgspec.structs.fields(cls) if cls else ()
    return {field.encode_name: field.type for field in fields if field.type is not Given}


def _type_of(cls: Any, key: str) -> Any:
    """The type at a dotted key of a struct."""
    for name in re.sub(r"\[[^]]*\]", "", key).split("."):
        cls = types_of(struct_type(cls)).get(name)
    return cls


def _literals(annotation: Any) -> tuple[Any, ...]:
    """The values of the `Literal` in an annotation."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return arguments
    return next(filter(None, map(_literals, arguments)), ())


def struct_type(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct within an annotation such as `tuple[Link, ...]` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    for argument in typing.get_args(annotation):
        struct = struct_type(argument)
        if struct is not None:
            return struct
    return None


def explain(raw: dict[str, Any], error: msgspec.ValidationError) -> tuple[str, str]:
    """The dotted key that an error of msgspec is about, and the problem with its value."""
    message, _, path = str(error).partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    if missing:
        return quoted(f"{path}.{missing[1]}" if path else missing[1]), "is missing; add it"
    value: Any = raw
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            break
    if isinstance(value, dict):
        written = "a table"
    else:
        written = f"'{quoted(value)}'" if isinstance(value, str) else quoted(value)
    problem = quoted(f"{message[0].lower()}{message[1:]}", 2 * MOST_QUOTED)
    problem = problem.replace(" | null`", "`").replace("expected `object`", "expected a table")
    problem = problem.replace("expected `int`,", "expected `int`, a whole number such as 8192,")
    problem = problem.replace("expected `array`", "expected a list such as [1, 2]")
    if "matching regex" in message:
        problem = "write it on one line, without control characters or marks of direction"
    return quoted(path), f"is {written}: {problem}"
