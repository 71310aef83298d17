"""Values of arguments. Each error says what was given and what is allowed."""

import argparse
import itertools as it
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import prism_jax as prism

from .._misc import quoted


T = TypeVar("T")
# Samples and seeds have numbers of 32 bits.
_MOST = 2**32
# The most values of one key, and the most combinations: each takes a tenth of a second or more.
_MOST_POINTS = 10_000
_IN_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def reader(
    convert: Callable[[str], T], allowed: Callable[[T], bool], meaning: str
) -> Callable[[str], T]:
    """Reads values that are allowed. Others raise an `ArgumentTypeError` that says what they must
    be.
    """

    def read(text: str) -> T:
        try:
            value = convert(text)
            if allowed(value):
                return value
        except (ValueError, OverflowError, AttributeError, KeyError):
            pass
        raise argparse.ArgumentTypeError(f"`{quoted(text)}` must be {meaning}")

    return read


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return int(number) if number == int(number) else -1


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text.lower() or "").groups()  # pyright: ignore
    return float(number) * _IN_SECONDS[unit]


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def _slice(text: str) -> slice:
    numbers = [int(word) if word.strip() else None for word in text.split(":")]
    if len(numbers) not in (2, 3) or numbers[2:] == [0]:
        raise ValueError
    return slice(*numbers)


def _shard(text: str) -> tuple[int, int]:
    which, many = (int(n) if re.fullmatch(r"\s*\d{1,9}\s*", n) else 0 for n in text.split("/"))
    return which, many


def quantile_of(text: str) -> float:
    """The quantile that a text means: `0.99` or `p99`."""
    percentage = text.lower().removeprefix("p")
    return float(text) if percentage == text.lower() else float(f"{percentage}e-2")


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers of at least `least`; `1e6` and `1_000_000` are fine too."""
    meaning = f"a whole number of at least {least} and below 2^32, such as 8192"
    return reader(_whole, lambda value: least <= value < _MOST, meaning)


def number(least: float, meaning: str) -> Callable[[str], float]:
    """Reads numbers from `least` to 1e9."""
    return reader(float, lambda x: least <= x <= 1e9, meaning)


count = whole(1)
seconds = number(0, "a number of seconds from 0 to 1e9")
# That JAX accepts.
seed = reader(int, lambda value: 0 <= value < _MOST, "a whole number from 0 to 2^32 - 1")
tokens = reader(
    _whole, lambda value: 1 <= value <= 10**18, "a whole number, such as 15e12, from 1 to 1e18"
)
duration = reader(
    _seconds, lambda s: 1 <= s <= 1e9, "a time such as 60s, 2m or 90 (seconds), from 1 s to 1e9 s"
)
percentage = reader(_share, lambda share: 0 <= share < 1, "a share such as 10% or 0.1, below 100%")
quantile = reader(
    quantile_of,
    lambda q: 0 <= q <= 1,
    "a number from 0 to 1, such as 0.99, or a percentage, such as p99",
)
# Each number may be left out.
steps = reader(_slice, lambda _: True, "a slice such as 0:100 or ::2")
shard = reader(
    _shard, lambda share: 1 <= share[0] <= share[1], "a share such as 3/16, from 1/16 to 16/16"
)
_quantile = reader(
    quantile_of,
    lambda q: 0 < q < 1,
    "a number between 0 and 1, such as 0.999, or a percentage, such as p99.9",
)


def quantiles(text: str) -> dict[str, float]:
    """Numbers between 0 and 1, separated by commas, with their names: `0.999` is `p99.9`."""
    return {f"p{100 * q:.12g}": q for q in (_quantile(word.strip()) for word in text.split(","))}


def address(text: str) -> str:
    """The address of a Ray cluster."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the address is empty; give host:port or auto, or leave it out for this machine"
        )
    return text


def named_factor(text: str, option: str, example: str, *, most: float = 1e6) -> tuple[str, float]:
    """A name and a positive number, separated by `:` or `=` as in the example. A number above
    `most`, or below its inverse, is refused as a mistake; figures with it would not be finite.
    """
    name, _, number = text.rpartition(":" if ":" in example else "=")
    try:
        factor = float(number)
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
    option = f"--objective `{quoted(text)}`"
    match = re.fullmatch(r"(mean|std)|(p|cvar|over)(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    if not match:
        raise ValueError(
            f"{option} must be mean, std, p95, p99.9, cvar95, or over1.7 (the probability of more "
            "than 1.7 s)."
        )
    if match[1]:
        return prism.analysis.Mean() if match[1] == "mean" else prism.analysis.Std()
    level = float(match[3])
    if match[2] == "over":
        try:
            return prism.analysis.Exceedance(level)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
    if not 1 <= level < 100:
        end = f"; did you mean {match[2]}{100 * level:.12g}?" if 0.01 <= level < 1 else "."
        raise ValueError(
            f"{option} must have a percentage of at least 1 and below 100, as p95 or cvar99.9{end}"
        )
    return (prism.analysis.Quantile if match[2] == "p" else prism.analysis.CVaR)(level / 100)


def values(
    text: str, option: str = "--over", example: str = "layout.dp=16,32,64"
) -> tuple[str, list[str]]:
    """A key and its values: `key=a,b,c` or `key=from:to:how_many`. Raises a `ValueError`."""
    option = f"`{option} {quoted(text)}`"
    key, equals, choices_text = (part.strip() for part in text.partition("="))
    if not key or not equals or not choices_text:
        raise ValueError(f"{option} is not a key and its values; write it as `{example}`.")
    if choices_text[0] in "[{":
        raise ValueError(
            f"{option} gives lists or tables; vary keys that have one number or word, as in "
            f"`{example}`, and give a list by `--set`."
        )
    if ":" not in choices_text:
        choices = [choice.strip() for choice in choices_text.split(",")]
        if len(choices) > _MOST_POINTS:
            raise ValueError(
                f"{option} has {len(choices):,} values; a sweep takes up to {_MOST_POINTS:,}, so "
                "give fewer."
            )
        if not all(choices):
            raise ValueError(f"{option} has an empty value; separate values by one comma.")
        return key, choices
    try:
        first, last, number = choices_text.split(":")
        low, high, many = float(first), float(last), int(number)
        if not (1 <= many <= _MOST_POINTS and math.isfinite(high - low)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{option} is not a range; write from, to and how many (1 to {_MOST_POINTS}), as in "
            "`kernels.all_gather.sigma=0.01:0.2:20`."
        ) from None
    step = (high - low) / max(many - 1, 1)
    return key, [f"{low + i * step:.12g}" for i in range(many)]


def points(texts: list[str]) -> list[dict[str, str]]:
    """All combinations of the values of keys (`--over`); a single empty one if there are none.
    Raises a `ValueError`.
    """
    over = dict(map(values, texts))
    many = math.prod(map(len, over.values()))
    if many > _MOST_POINTS:
        raise ValueError(
            f"The values of `--over` make {many:,} combinations; a sweep takes up to "
            f"{_MOST_POINTS:,}, so give fewer values."
        )
    return [dict(zip(over, row, strict=True)) for row in it.product(*over.values())]


def changes_of(point: dict[str, str]) -> list[str]:
    """A combination of values as changes of a job."""
    return [f"{key}={value}" for key, value in point.items()]
