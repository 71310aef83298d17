"""Step times in what a training loop prints, line by line."""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from ._series import Series, known


# Ranks that print to one file are told apart by what `torchrun` and `srun --label` put first.
_RANK = re.compile(r"\s*(?:\[(?:default|rank)(\d+)\]:|(\d+):\s)")
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9}
# Progress bars are drawn over one another in a line.
_PARTS = re.compile(r"[\r\n]+")


@dataclasses.dataclass
class _Format:
    """How a framework writes a step, and what was read so far."""

    framework: str
    step: re.Pattern[str]
    value: re.Pattern[str]
    unit: str
    smoothed: bool
    last: int = 0
    rank: str = ""
    values: list[float] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)


def series_of_lines(lines: Iterable[str]) -> Series | None:
    """The step times of a log; `None` if no line has one.

    **Arguments:**

    - `lines`: of the file. Of several ranks, those of the rank that writes first are read.
    """
    formats = [
        _Format(
            table["framework"],
            re.compile(table["step"]),
            re.compile(table["value"]),
            table["unit"],
            table.get("smoothed", False),
        )
        for table in known()["lines"]
    ]
    kinds = {kind: re.compile(pattern) for kind, pattern in known()["pauses"].items()}
    pauses: dict[str, list[int]] = {kind: [] for kind in kinds}
    parts = (part for line in lines for part in _PARTS.split(line))
    for place, line in enumerate(parts):
        for form in formats:
            _read(form, line, place)
        for kind, pattern in kinds.items():
            if pattern.search(line):
                pauses[kind].append(place)
    form = next((form for form in formats if form.values), None)
    if form is None:
        return None
    places = np.array(form.places)
    before = {kind: _before(places, np.array(at, int)) for kind, at in pauses.items() if at}
    return Series(
        np.array(form.values),
        np.array(form.steps),
        form.unit,
        form.framework,
        before,
        form.smoothed,
    )


def _read(form: _Format, line: str, place: int) -> None:
    """Reads the number of a step and a value of a line, in place."""
    if (step := form.step.search(line)) is not None:
        form.last = int(step[1])
    if (value := form.value.search(line)) is None:
        return
    of_rank = _RANK.match(line)
    rank = "" if of_rank is None else of_rank[1] or of_rank[2]
    if not form.values:
        form.rank = rank
    if rank != form.rank:
        return
    text = value[1].replace(",", "")
    factor = _FACTORS.get(text[-1], 1.0)
    try:
        number = float(text.rstrip("KMB")) * factor
    except ValueError:
        return
    form.values.append(number)
    form.steps.append(form.last or len(form.values))
    form.places.append(place)


def _before(places: np.ndarray, pauses: np.ndarray) -> np.ndarray:
    """Whether a pause lies between a value and the one before it."""
    next_values = np.searchsorted(places, pauses)
    marked = np.zeros(len(places) + 1, bool)
    marked[next_values] = True
    marked[0] = False
    return marked[:-1]
