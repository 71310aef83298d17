"""Rows of measured data. What is wrong with a row becomes its reason, so that no row loses the
others.
"""

import argparse
import csv
import math
import pathlib
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from prism_jax import data
from prism_jax.data import check_parts
from prism_jax.prediction import predict
from prism_jax.workload import check_split

from .tables import Row


ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


def words(name: str) -> Any:
    """The contents of a TOML file beside this one."""
    return tomllib.loads(pathlib.Path(__file__).with_name(f"{name}.toml").read_text())


# What words of published rows are in jobs.
WORDS = words("published")


def measurements(text: str) -> pathlib.Path:
    """The folder of `--data`, for `argparse`."""
    if not (folder := pathlib.Path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; name one with --data")
    return folder.resolve()


# What `argparse` has of `--data`.
MEASUREMENTS: Any = {"type": measurements, "default": str(DATA), "help": "the measurements"}


def read(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, where a missing column is an empty one; none if the file is missing,
    which is noted on stderr."""
    if not path.is_file():
        note(f"{path} is missing and left out")
        return []
    with path.open(newline="") as file:
        rows = csv.DictReader(file, restval="")
        return [defaultdict(str, {k: v.strip() for k, v in row.items() if k}) for row in rows]


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function returns, or `None` and the reason why it cannot."""
    try:
        return function(*arguments), ""
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        reason = isinstance(error, ValueError) and str(error)
        return None, reason or f"its values cannot be used ({type(error).__name__}: {error})"


def count(row: dict[str, str], key: str, default: int | None = None, least: int = 1) -> int:
    """A column that is a whole number, for which an empty one has a default."""
    text = row.get(key) or ""
    if not text and default is not None:
        return default
    value = number(text, least)
    if value is None or value % 1:
        known = f"{text}, no whole number from {least}" if text else "not given"
        raise ValueError(f"`{key}` is {known}")
    return int(value)


def number(text: Any, least: float = 1e-12) -> float | None:
    """A number, if it is finite and at least so much."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if least <= value < math.inf else None


def job_of(function: Callable[[dict[str, str]], data.Job], row: dict[str, str]) -> data.Job:
    """The job of a row by a function.

    **Raises:**

    A `ValueError` where nothing can be predicted for it.
    """
    job: Any = function(row)
    check_parts(job.model, job.layout, job.schedule, job.training, job.cluster)
    check_split(job.model, job.layout, job.schedule, job.training)
    return job


def with_kernels(job: Any, **changes: Any) -> data.Job:
    """A job with other values of keys of its kernels."""
    kernels = msgspec.structs.replace(job.kernels, **changes)
    return msgspec.structs.replace(job, kernels=kernels)


def slower(kernels: Any, factor: Callable[[Any], float]) -> tuple[Any, ...]:
    """The tables of efficiency with which kernels take longer by a factor of each table."""
    each = [(one, tuple(x / factor(one) for x in one.values)) for one in kernels.efficiency]
    return tuple(msgspec.structs.replace(one, values=values) for one, values in each)


def predicted(job: data.Job | None, reason: str = "") -> tuple[float, str]:
    """The predicted step time of a job in seconds, or 0 and the reason why there is none."""
    found, wrong = attempt(predict, job) if job else (None, reason)
    return (found.mean, "") if found else (0.0, wrong)


def note(text: str) -> None:
    """Says on stderr what is left out."""
    print(text, file=sys.stderr)


def note_left_out(number: int, path: pathlib.Path, reason: str) -> None:
    """Says how many rows of a file are left out, if any."""
    if number:
        note(f"{number} rows of {path} are left out: {reason}")


def reason_lines(rows: Iterable[Row]) -> list[str]:
    """How many rows have which reason, in Markdown."""
    reasons = Counter(row["reason"] for row in rows if "reason" in row)
    return [f"- {number}: {reason}" for reason, number in reasons.most_common()]
