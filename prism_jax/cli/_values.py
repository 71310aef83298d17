"""Values of given. Each error says what was given and what is allowed."""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from .._files import check_writable, shown
from .._misc import quoted


T = TypeVar("T")
# Samples and seeds have numbers of 32 bits.
_MOST = 2**32


def read(text: str, convert: Callable[[str], T], allowed: Callable[[T], bool], what: str) -> T:
    """A value that is allowed. Raises an `ArgumentTypeError` that says what it must be."""
    try:
        value = convert(text)
        if allowed(value):
            return value
    except (ValueError, OverflowError, AttributeError, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"`{quoted(text)}` must be {what}")


def count(text: str, least: int = 1) -> int:
    """A whole number of at least `least`; `1e6` and `1_000_000` are fine too."""
    what = f"a whole number of at least {least} and below 2^32, such as 8192"
    return read(text, _whole, lambda value: least <= value < _MOST, what)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return int(number) if number == int(number) else -1


def tokens(text: str) -> int:
    """A whole number of tokens; `15e12` is fine too."""
    what = "a whole number, such as 15e12, from 1 to 1e18"
    return read(text, _whole, lambda value: 1 <= value <= 10**18, what)


def seed(text: str) -> int:
    """A whole number that JAX accepts as a seed."""
    return read(text, int, lambda value: 0 <= value < _MOST, "a whole number from 0 to 2^32 - 1")


_IN_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Seconds: `90`, `60s`, `2m` or `1h`."""
    what = "a time such as 60s, 2m or 90 (seconds), from 1 s to 1e9 s"
    return read(text, _seconds, lambda seconds: 1 <= seconds <= 1e9, what)


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text.lower() or "").groups()  # pyright: ignore
    return float(number) * _IN_SECONDS[unit]


def percentage(text: str) -> float:
    """A share below 1: `10%` or `0.1`."""
    what = "a share such as 10% or 0.1, below 100%"
    return read(text, _share_of_one, lambda share: 0 <= share < 1, what)


def _share_of_one(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def number(least: float, what: str) -> Callable[[str], float]:
    """Reads numbers from `least` to 1e9."""
    return lambda text: read(text, float, lambda x: least <= x <= 1e9, f"a number of {what}")


def quantile(text: str) -> float:
    return read(text, float, lambda q: 0 <= q <= 1, "a number in [0, 1]")


def steps(text: str) -> slice:
    """A slice, `A:B` or `A:B:S`. Each number may be left out."""
    return read(text, _slice, lambda _: True, "a slice such as 0:100 or ::2")


def _slice(text: str) -> slice:
    numbers = [int(word) if word.strip() else None for word in text.split(":")]
    if len(numbers) not in (2, 3) or numbers[2:] == [0]:
        raise ValueError
    return slice(*numbers)


def _level(text: str) -> float:
    percentage = text.lower().removeprefix("p")
    return float(text) if percentage == text.lower() else float(f"{percentage}e-2")


def quantiles(text: str) -> dict[str, float]:
    """Numbers between 0 and 1, separated by commas, with their names: `0.999` is `p99.9`."""
    what = "a number between 0 and 1, such as 0.999, or a percentage, such as p99.9"
    found = [read(word.strip(), _level, lambda q: 0 < q < 1, what) for word in text.split(",")]
    return {f"p{100 * q:.12g}": q for q in found}


def shard(text: str) -> tuple[int, int]:
    """`I/N`, from `1/N` to `N/N`."""
    what = "a share such as 3/16, from 1/16 to 16/16"
    return read(text, _share, lambda share: 1 <= share[0] <= share[1], what)


def _share(text: str) -> tuple[int, int]:
    which, many = (int(n) if re.fullmatch(r"\s*\d{1,9}\s*", n) else 0 for n in text.split("/"))
    return which, many


def named_factor(text: str, option: str, example: str, *, most: float = 1e6) -> tuple[str, float]:
    """A name and a positive number, separated by `:` or `=` as in the example. A number above
    `most`, or below its inverse, is refused as a mistake; figures with it would not be finite.
    """
    name, _, given = text.rpartition(":" if ":" in example else "=")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not name or not 1 / most <= factor <= most:
        raise ValueError(
            f"{option} `{quoted(text)}` must be a name and a positive number from {1 / most:g} "
            f"to {most:g}: `{example}`."
        )
    return name, factor


def objective(text: str) -> Any:
    """`mean`, `std`, `p95`, `cvar95`, or `over1.7` for the probability of more than 1.7 s."""
    from ..analysis import CVaR, Exceedance, Mean, Quantile, Std

    found = re.fullmatch(r"(mean|std)|(p|cvar|over)(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    if not found:
        raise ValueError(
            f"--objective `{quoted(text)}` must be mean, std, p95, p99.9, cvar95, or over1.7 (the "
            "probability of more than 1.7 s)."
        )
    if found[1]:
        return Mean() if found[1] == "mean" else Std()
    level = float(found[3])
    if found[2] == "over":
        try:
            return Exceedance(level)
        except ValueError as error:
            raise ValueError(f"--objective `{quoted(text)}`: {error}") from None
    if not 0 < level / 100 < 1:
        raise ValueError(
            f"--objective `{quoted(text)}` must have a percentage between 0 and 100, as p95 or "
            "cvar99.9."
        )
    return (Quantile if found[2] == "p" else CVaR)(level / 100)


def check_out(path: str | None, suffix: str) -> None:
    """Raises a `ValueError` unless a file with this suffix can be written there."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    try:
        check_writable(folder)
        good = path.endswith(suffix) and not os.path.isdir(path) and os.path.isdir(folder)
    except OSError:
        good = False
    if not good:
        raise ValueError(
            f"--out `{shown(path)}` must be a {suffix} file in a folder that exists and can be "
            "written to."
        )


def check_out_folder(path: str | None) -> None:
    """Raises a `ValueError` unless files can be written to that folder, which need not exist."""
    if path is None:
        return
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise ValueError(f"--out `{shown(path)}` is not a folder; give the name of one.")
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(
            f"--out `{shown(path)}`: nothing can be written there ({error.strerror}); give another "
            "folder."
        ) from None
