"""Step times in what a training loop prints, line by line."""

import dataclasses
import itertools as it
import re
from typing import NamedTuple

import numpy as np

from ._series import Series, known


# Ranks that print to one file are told apart by what `srun --label`, `torchrun` and `mpirun` put
# first.
_RANK = re.compile(r"\s*(?:\d+:\s)?\s*(?:\[[a-z_]+\d+\]:|\[\d+,\d+\]<\w+>:)?")
_MOST_DIGITS = 16
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9}
# Progress bars are drawn over one another in a line.
_PARTS = re.compile(r"[\r\n]+")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Value(NamedTuple):
    """A value of a step, the part of the log in which it is, and the steps of its progress bar."""

    step: int
    value: float
    place: int
    total: str = ""


@dataclasses.dataclass
class _Format:
    """How a framework writes a step, and what was read so far."""

    framework: str
    step: re.Pattern[str]
    value: re.Pattern[str]
    unit: str
    smoothed: bool
    total: re.Pattern[str] | None
    last: int | None = None
    rank: str = ""
    values: list[_Value] = dataclasses.field(default_factory=list)


def series_of_lines(text: str) -> Series | None:
    """The step times of a log; `None` if no line has one.

    **Arguments:**

    - `text`: of the file. Of several ranks, those of the rank that writes first are read.
    """
    formats = [
        _Format(
            table["framework"],
            re.compile(table["step"]),
            re.compile(table["value"]),
            table["unit"],
            table.get("smoothed", False),
            re.compile(table["total"]) if "total" in table else None,
        )
        for table in known()["lines"]
    ]
    kinds = {kind: re.compile(pattern) for kind, pattern in known()["pauses"].items()}
    loaded = re.compile(known()["restarts"]["loaded"])
    pauses: dict[str, list[int]] = {kind: [] for kind in kinds}
    restarts = []
    parts = _PARTS.split(_COLOURS.sub("", text))
    for place, line in enumerate(parts):
        paused = [kind for kind, pattern in kinds.items() if pattern.search(line)]
        for kind in paused:
            pauses[kind].append(place)
        if loaded.search(line):
            restarts.append(place)
        # What validates may have a number of steps and a rate of its own.
        for form in [] if paused else formats:
            _read(form, line, place, unfinished=place == len(parts) - 1)
    form = next((form for form in formats if form.values), None)
    if form is None:
        return None
    values = _of_longest_bar(form.values)
    places = np.array([value.place for value in values])
    before = {kind: _before(places, np.array(at, int)) for kind, at in pauses.items() if at}
    return Series(
        np.array([value.value for value in values]),
        np.array([value.step for value in values]),
        form.unit,
        form.framework,
        before,
        _before(places, np.array(restarts, int)),
        form.smoothed,
    )


def _read(form: _Format, line: str, place: int, unfinished: bool) -> None:
    """Reads the number of a step and a value of a line, in place. Of a line that is still written,
    a number at its end may be cut.
    """
    step = form.step.search(line)
    if step is not None and len(step[1]) < _MOST_DIGITS:
        form.last = int(step[1])
    value = form.value.search(line)
    if value is None or (unfinished and value.end(1) == len(line)):
        return
    prefix = _RANK.match(line)
    rank = "" if prefix is None else prefix[0].strip()
    if not form.values:
        form.rank = rank
    if rank != form.rank:
        return
    text = value[1].replace(",", "")
    try:
        number = float(text.rstrip("KMB")) * _FACTORS.get(text[-1], 1.0)
    except ValueError:
        return
    if value.re.groups == 2 and value[2] == "it/s":
        number = 1 / number if number else 0.0
    total = None if form.total is None else form.total.search(line)
    if form.total is not None and (total is None or not number):
        return
    number_of_step = len(form.values) + 1 if form.last is None else form.last
    form.values.append(_Value(number_of_step, number, place, total[1] if total else ""))


def _of_longest_bar(values: list[_Value]) -> list[_Value]:
    """The values of the progress bar that took most time: those of training."""
    seconds: dict[str, float] = dict.fromkeys((value.total for value in values), 0.0)
    for before, after in it.pairwise([values[0]._replace(step=0), *values]):
        steps = after.step - before.step if before.total == after.total else after.step
        seconds[after.total] += max(steps, 0) * after.value
    longest = max(seconds, key=lambda total: seconds[total])
    return [value for value in values if value.total == longest]


def _before(places: np.ndarray, pauses: np.ndarray) -> np.ndarray:
    """Whether a pause lies between a value and the one before it."""
    next_values = np.searchsorted(places, pauses)
    marked = np.zeros(len(places) + 1, bool)
    marked[next_values] = True
    marked[0] = False
    return marked[:-1]
