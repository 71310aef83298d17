"""Measured steps of a file as it is: which they are, how long, and which count."""

import csv
import dataclasses
import json
import os
from collections import Counter
from typing import Any

import numpy as np
from jaxtyping import Float

from .._files import Path, read_file, shown
from .._misc import STEP_TIME, plural, quoted
from .._summary import Shown, picked_attributes
from ..data import Job, located
from ..trace import read_runs
from ._columns import (
    MOST_HEADER,
    columns_of_csv,
    columns_of_events,
    columns_of_json,
    has_step_times,
    series_of_columns,
)
from ._lines import series_of_lines
from ._series import UNITS, Series
from ._steps import LeftOut, counted_steps


_MOST_BYTES = 2**28
_EVENTS = ".tfevents."
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Steps go back once for each restart; if more of them do, several ranks have written.
_MOST_RESTARTS = 0.2


@dataclasses.dataclass(frozen=True, repr=False)
class Measured(Shown):
    """Measured steps.

    **Attributes:**

    - `runs`: the step times of each run, in seconds, in the order of steps: `(steps,)` each. Where
        only the level of the steps is known, each has one.
    - `left_out`: the steps that do not count, by kind.
    - `source`: the framework, or the column, that they are from.
    - `notes`: a sentence for each thing that one must know of them.
    """

    runs: tuple[Float[np.ndarray, " _steps"], ...]
    left_out: tuple[LeftOut, ...]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        """How many steps count."""
        return sum(map(len, self.runs))

    def to_json(self) -> dict[str, Any]:
        """How many steps count, and which do not."""
        return picked_attributes(self, "used", "left_out")

    def headline(self) -> str:
        away = ", ".join(f"{left.count:,} {left.kind}" for left in self.left_out)
        return f"{self.source}: {plural(self.used, 'step')}; left out: {away or 'none'}"


def read_log(
    path: Path, job: Job | None = None, *, column: str | None = None, unit: str | None = None
) -> Measured:
    """Reads the step times of a log, or of a table of metrics, of any framework that is known.

    What a file is, is found by its content: a table with a column `step_time_s`, all of whose steps
    count; lines of a training loop; a CSV or JSON file of W&B or TensorBoard; an event file; the
    `trainer_state.json` of Transformers. A rate becomes a time by the batch of the job. See
    `counted_steps` for the steps that count.

    **Arguments:**

    - `path`: the file.
    - `job`: the job that was measured, for rates.
    - `column`, `unit`: of a table, the name of the column, and the unit of its values: one of `s`,
        `ms`, `steps/s`, `tokens/s`, `samples/s`, or the last two with `/GPU` for each GPU; by
        default as the name says.

    **Raises:**

    `ValueError` of one sentence if the file has no step times, or a rate and there is no job.
    """
    if unit is not None and unit not in UNITS:
        raise ValueError(f"The unit `{quoted(unit)}` is not known; use one of {', '.join(UNITS)}.")
    name = os.path.basename(os.fspath(path))
    if name.endswith(".parquet") and (column is not None or unit not in (None, "s")):
        raise ValueError(
            f"{shown(path)}: of a .parquet file the column `{STEP_TIME}` is read, in s; drop "
            "`--column` and `--unit`, or give a .csv file."
        )
    is_ours = column is None and unit in (None, "s") and _has_step_times(path, name)
    if name.endswith(".parquet") or is_ours:
        return Measured(tuple(read_runs(path)), (), shown(path))
    content = content_of(path)
    with located(shown(path)):
        try:
            all_series = _series_of(name, content, column, unit)
        except (ValueError, RecursionError, csv.Error) as error:
            raise ValueError(f"{str(error).rstrip('.')}.") from None
        if not all_series:
            raise ValueError(
                "it has no step times of a framework that is known; give a table with `--column` "
                "and `--unit`."
            )
        return _measured(all_series, job)


def content_of(path: Path) -> bytes:
    """The content of a file, or a `ValueError` of one sentence."""
    try:
        return read_file(path, _MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{shown(path)}: there is no such file; give another.") from None
    except OSError as error:
        why = (error.strerror or "").lower()
        raise ValueError(f"{shown(path)}: it cannot be read ({why}); give another.") from None


def text_of(content: bytes) -> str:
    """The text of a file."""
    return content.decode("utf-16" if content[:2] in _UTF_16 else "utf-8-sig", "replace")


def _has_step_times(path: Path, name: str) -> bool:
    """Whether a file is a table of step times, as this package writes them."""
    if not name.endswith(".csv") or not os.path.isfile(path):
        return False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return STEP_TIME in next(csv.reader([file.readline(MOST_HEADER)]), [])


def _series_of(name: str, content: bytes, column: str | None, unit: str | None) -> list[Series]:
    """The series that a file has."""
    if _EVENTS in name:
        return series_of_columns(columns_of_events(content), column, unit)
    text = text_of(content)
    if text.lstrip().startswith(("{", "[")):  # Lines of a log may begin so, too.
        try:
            return series_of_columns(columns_of_json(text), column, unit)
        except json.JSONDecodeError as error:
            if name.endswith((".json", ".jsonl")):
                raise ValueError(f"it is damaged JSON ({error})") from None
    if name.endswith((".csv", ".tsv")) or column is not None or has_step_times(text):
        return series_of_columns(columns_of_csv(text), column, unit)
    series = series_of_lines(text)
    if series is not None and unit is not None:
        raise ValueError(
            f"it is a log of {series.source}, whose unit is known; `--unit` is that of a table's "
            "column: drop it"
        )
    return [] if series is None else [series]


def _measured(all_series: list[Series], job: Job | None) -> Measured:
    """The steps of all series, whose runs begin where the number of the step goes back."""
    runs, notes, left_out = [], [], Counter[str]()
    for series in all_series:
        times = _seconds(series, job)
        wrong = ~((times > 0) & (times < 1e9))
        if wrong.any():
            raise ValueError(
                f"step {series.steps[wrong][0]} took {times[wrong][0]:g} s, where a positive time "
                "is needed; give another file, or a table with `--column` and `--unit`."
            )
        # A step that is written twice, as by several ranks, is read once.
        again = np.flatnonzero(np.diff(series.steps, prepend=series.steps[0] - 1) != 0)
        back = np.diff(series.steps[again]) < 0
        if np.sum(back) > max(_MOST_RESTARTS * len(again), 3):
            raise ValueError("several ranks or runs have written it in turn; give a log of one.")
        restarts = [] if series.restarts is None else np.flatnonzero(series.restarts[again][1:])
        ends = np.union1d(np.flatnonzero(back), restarts).astype(int) + 1
        for run in np.split(again, ends):
            kept, kinds = counted_steps(times[run], series, run)
            left_out.update({left.kind: left.count for left in kinds})
            interval = int(np.median(np.diff(series.steps[run]))) if len(run) > 1 else 1
            used = times[run][kept]
            if interval > 1 or series.smoothed:
                is_mean = "a mean of those before it" if series.smoothed else f"of {interval} steps"
                notes.append(f"Each value is {is_mean}, so that only the level of steps is known.")
                used = np.array([np.median(used)])
            runs.append(used)
    kinds = tuple(LeftOut(kind, count) for kind, count in left_out.items())
    return Measured(tuple(runs), kinds, all_series[0].source, (*dict.fromkeys(notes),))


def _seconds(series: Series, job: Job | None) -> Float[np.ndarray, " values"]:
    """The times of steps. A rate of tokens or samples becomes a time by the job's batch."""
    noun, _, per = series.unit.partition("/")
    if series.unit in ("s", "ms"):
        return series.values * {"s": 1.0, "ms": 1e-3}[series.unit]
    if noun == "steps":
        amount = 1
    elif job is None or job.training is None:
        raise ValueError(
            f"`{series.source}` is a rate of {noun}, and no batch is known; give the job that was "
            "measured."
        )
    else:
        amount = job.tokens_per_step if noun == "tokens" else job.batch_size
        amount /= job.layout.world_size if per.endswith("GPU") else 1
    with np.errstate(divide="ignore"):
        return amount / series.values
