"""Small helpers without a better home."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np


T = TypeVar("T")


class OutOfMemoryWarning(UserWarning):
    """A job was compiled that needs more memory than is usable of its devices."""


def subclasses(cls: type[T]) -> Iterator[type[T]]:
    """All subclasses of a class, in the order of their definitions, including other packages."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """The inner product. (In BLAS, the last bits depend on the number of cores.)"""
    return float(np.sum(a * b))


# What is quoted of an input, in characters: enough to find it by.
MOST_QUOTED = 80


def quoted(value: object, most: int = MOST_QUOTED) -> str:
    """A given value for a message, printable and cut if it is long. A string is shown as it is, any
    other value as its `repr`.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits.
        text = f"a very large {type(value).__name__}"
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return printable(text)


def printable(text: str, keep: str = "") -> str:
    """A text whose characters a terminal only prints: line breaks, codes that control it (C0, C1)
    and those that turn the direction of writing become escapes such as `\\x1b`, except those in
    `keep`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """A sentence for an unknown name, with known names: similar ones first, but not too many."""
    known, name = sorted({*known}), quoted(name)
    close_names = [quoted(n) for n in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(f'`{n}`' for n in close_names)}?" if close_names else "."
    shown = quoted(", ".join(known[:_MOST_NAMES]), 3 * MOST_QUOTED)
    and_more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"No {kind} `{name}`{hint} Known: {shown or 'none'}{and_more}."


_MOST_NAMES = 12


def check_type(value: object, wanted: type, noun: str, fix: str) -> None:
    """Raises a `ValueError` unless a value is of a type.

    **Arguments:**

    - `noun`: what is wanted, such as `"law"`.
    - `fix`: what to do, such as "use `simulate` to get one".
    """
    if not isinstance(value, wanted):
        name = type(value).__name__
        raise ValueError(
            f"{_article(name).capitalize()} `{name}` was given in place of "
            f"{_article(noun)} {noun}; {fix}."
        )


def whole_number(value: object, name: str, least: int = 1, most: int | None = None) -> int:
    """A value as an `int`. Raises a `ValueError` unless it is a whole number of at least `least`,
    and at most `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"`{name}={quoted(value)}` must be a whole number of at least {least}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}={quoted(value)}` must be at most {most:,}.")
    return int(value)


# The column of step times, in seconds, in files and in data frames.
STEP_TIME = "step_time_s"


def as_step_times(measured: Any) -> Any:
    """Step times as they are given or, of a data frame of polars or pandas, its column of them."""
    if not _is_frame(measured):
        return measured
    if STEP_TIME not in measured.columns:
        names = quoted(", ".join(map(str, measured.columns)), 2 * MOST_QUOTED) or "none"
        raise ValueError(f"The data frame has no column `{STEP_TIME}`; it has {names}.")
    try:
        return np.asarray(measured[STEP_TIME], float)
    except (TypeError, ValueError):
        raise ValueError(
            f"The data frame has no numbers in its column `{STEP_TIME}`; give seconds."
        ) from None


def runs_of(measured: Any) -> list[np.ndarray]:
    """The step times of each run, or of a data frame: by its column `run`, in the order of `step`,
    if it has them.
    """
    if not _is_frame(measured):
        return [np.asarray(as_step_times(run), float) for run in measured]
    steps = as_step_times(measured)
    run, step = (
        np.asarray(measured[name] if name in measured.columns else np.zeros(len(steps)))
        for name in ("run", "step")
    )
    order = np.argsort(step, kind="stable")
    return [steps[order[run[order] == name]] for name in dict.fromkeys(run.tolist())]


def _is_frame(measured: Any) -> bool:
    return all(hasattr(measured, name) for name in ("to_numpy", "columns"))


def _article(word: str) -> str:
    return "an" if word[0].lower() in "aeio" else "a"


def plural(number: int, noun: str, plural: str = "s") -> str:
    """`1 row`, `2 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{plural}"


def bisect(
    is_low: Callable[[float], bool], low: float, high: float, num_halvings: int
) -> tuple[float, float]:
    """The two ends of the interval in which `is_low` turns from true to false, after bisections."""
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


def unit_of_seconds(seconds: Iterable[float]) -> tuple[float, str]:
    """The unit in which the largest of some times is at least one, and its number in a second."""
    largest = max((abs(x) for x in seconds if np.isfinite(x)), default=1.0)
    for per_second, unit in ((1.0, "s"), (1e3, "ms")):
        if largest * per_second >= 1:
            return per_second, unit
    return 1e6, "µs"


def check_unit(
    measured: float, predicted: float, where: str = "These steps are in another unit: "
) -> None:
    """Raises a `ValueError` that begins with `where`, if measured steps are not in seconds, judging
    by their median and the predicted one.
    """
    if not 1 / _OTHER_UNIT < measured / predicted < _OTHER_UNIT:
        unit = "milliseconds" if measured > predicted else "a longer unit such as hours"
        raise ValueError(
            f"{where}the median of the measured steps is {measured:.4g} s, and that of the "
            f"prediction {predicted:.4g} s; give step times in seconds, not in {unit}, or correct "
            "the job."
        )


# Measured steps that differ from the prediction by this factor are in another unit.
_OTHER_UNIT = 200.0
