"""What each flag of Megatron-LM means for a job: see `megatron_flags.toml`."""

import functools as ft
import pathlib
import tomllib
from collections.abc import Mapping
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
    others = ((name, Flag(k, o)) for k in ("same", "opposite") for name, o in tables()[k].items())
    listed = ((kind, *one) for kind in _LISTED for one in tables()[kind].items())
    return {name: Flag(k, what) for k, what, all_ in listed for name in all_.split()} | dict(others)


_LISTED = ("sets", "no_effect", "noted", "refused", "refused_in_fp8")


def flag_of(name: str) -> Flag | None:
    """The meaning of a flag, if it is known."""
    known = known_flags()
    if name not in known and name.startswith(_beginnings()):
        name = next(f"{one}*" for one in _beginnings() if name.startswith(one))
    return known.get(name)


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
    known = known_flags()
    flag = flag_of(name)
    if flag is not None:
        return (
            (flag.what, flag.kind == "same") if flag.kind in ("same", "opposite") else (name, True)
        )
    for word in ("no-", "disable-"):
        for other in (name.removeprefix(word), word + name):
            if other in known and other != name:
                return other, False
    return name, True


# Scripts of other programs have more flags than that.
_MOST_UNKNOWN = 100
# Of the optimizer, on which everything else counts.
_IN_FLOAT32 = (
    *("exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype", "main-params-dtype"),
    *("megatron-fsdp-main-grads-dtype", "megatron-fsdp-main-params-dtype"),
)


def check_flags(read: Reader, dtype: str) -> None:
    """Adds all unread flags to the problems that a job with matrix multiplications in `dtype`
    cannot express, and notes those that are not known. Unknown flags are problems if they are
    almost a known one, and with `read.strict`.
    """
    for flag in _IN_FLOAT32:
        read.choice(flag, "fp32", ("fp32", "auto"))
    refusals = ("refused", "refused_in_fp8") if dtype in ("fp8", "mxfp8", "fp4") else ("refused",)
    unknown: list[str] = []
    for key in read.unread():
        kind, what = flag_of(key) or ("unknown", "")
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
    for known in known_flags():
        if _is_slip(name, known):
            return known
    words = {*name.split("-")}
    for known, flag in known_flags().items():
        if flag.kind == "sets" and len(words) > 1 and words < {*known.split("-")}:
            return known
    return ""


def _is_slip(name: str, known: str) -> bool:
    """Whether one letter differs, two letters are swapped, or at most two are missing or added."""
    if abs(len(name) - len(known)) > 2 or len(name) < 4:
        return False
    a, b = _without_beginning(name, known)
    a, b = _without_beginning(a[::-1], b[::-1])
    return len(a) + len(b) <= 2 or (len(a) == 2 and a == b[::-1])


def _without_beginning(a: str, b: str) -> tuple[str, str]:
    """Two words without the letters that both begin with."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    same = min(len(a), len(b)) if same is None else same
    return a[same:], b[same:]
