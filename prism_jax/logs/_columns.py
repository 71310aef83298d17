"""Tables of metrics: CSV and JSON as W&B, TensorBoard and Transformers write them, and event files.

A table is its columns by their names, each a list of texts or numbers, some of them empty.
"""

import csv
import functools as ft
import io
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._misc import MOST_QUOTED, quoted
from ._series import Series, known


Columns = dict[str, list[Any]]


_STEPS = ("step", "_step", "global_step", "trainer/global_step", "train/global_step", "iteration")
# The columns of W&B that show the scatter of smoothed values.
_SCATTER = ("__MIN", "__MAX")
_EMPTY = ("", "nan", "null", "none", "inf", "infinity", "-inf", "-infinity")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_COMMA = re.compile(r"-?[\d.]+,\d+")
MOST_HEADER = 2**20
_FLOATS = {1: "<f", 2: "<d"}  # By TensorFlow's number of a type.
# TensorBoard's export of one metric does not name it.
_TENSORBOARD = ("wall time", "step", "value")
# Values and the times between them agree if these differ by less.
_AGREEMENT = 0.1


def series_of_columns(columns: Columns, column: str | None, unit: str | None) -> list[Series]:
    """The series of a table: of W&B's exports, one for each run.

    **Arguments:**

    - `column`: the name of the column, in any case; by default the first that is known.
    - `unit`: of its values; by default that of its name.

    **Raises:**

    A `ValueError` of one sentence if there is no such column, or its unit is not known.
    """
    if not columns:
        raise ValueError("the file has no columns; give one with a column of step times")
    names = [name for name in columns if not name.endswith(_SCATTER)]
    lower = {name: _metric(name) for name in names}
    if column is None and set(_TENSORBOARD) <= {*lower.values()}:
        return [_of_wall_times({lower[name]: columns[name] for name in names}, unit)]
    units = _units()
    wanted = list(units) if column is None else [column.lower()]
    metric = next((metric for metric in wanted if metric in lower.values()), None)
    metric = metric or next((name.lower() for name in names if name == column), None)
    if metric is None and column is None:  # As `train/iteration-time`, but not of evaluation.
        parts = {name: name.rpartition("/")[2] for name in lower.values() if "eval" not in name}
        metric = next((name for word in units for name in parts if parts[name] == word), None)
    if metric is None:
        there = quoted(", ".join(names), 2 * MOST_QUOTED)
        if column is None:
            raise ValueError(
                f"no column is known to be a step time, among {there}; give `--column` and `--unit`"
            )
        raise ValueError(f"there is no column `{quoted(column)}`; it has {there}")
    unit = unit or units.get(metric) or units.get(metric.rpartition("/")[2])
    if unit is None:
        raise ValueError(f"the unit of `{quoted(metric)}` is not known; give `--unit`")
    of_runs = [name for name in names if lower[name] == metric or name.lower() == metric]
    steps = next((columns[name] for name in names if lower[name] in _STEPS), None)
    series = [_series(columns[name], steps, unit, metric) for name in of_runs]
    return [each_run for each_run in series if len(each_run.values)]


def has_step_times(text: str) -> bool:
    """Whether the first line of a text has the name of a column that is known."""
    line = next(iter(text[:MOST_HEADER].splitlines()), "")
    return any(
        _metric(name) in _units()
        for name in next(csv.reader([line], delimiter=_delimiter(line)), [])
    )


@ft.cache
def _units() -> dict[str, str]:
    """The unit of each metric that is known, and of the last part of its name."""
    units = {name: unit for unit, text in known()["columns"].items() for name in text.split()}
    last_parts = {name.rpartition("/")[2]: unit for name, unit in [*units.items()][::-1]}
    return units | {name: last_parts[name] for name in last_parts if name not in {*units, *_STEPS}}


def _metric(name: str) -> str:
    """The metric of a column, which W&B writes after the name of its run."""
    return name.rpartition(" - ")[2].strip().lower()


def _series(cells: list[Any], steps: list[Any] | None, unit: str, source: str) -> Series:
    """A series of the cells that hold a number."""
    values = np.array([_number(cell) for cell in cells], float)
    for row in np.flatnonzero(np.isnan(values)):
        if str(cells[row]).strip().lower() not in _EMPTY:
            raise ValueError(
                f"`{quoted(source)}` is `{quoted(str(cells[row]))}` in row {row + 1}, and no number"
            )
    numbers = np.arange(1, len(cells) + 1) if steps is None else np.array([*map(_number, steps)])
    full = np.isfinite(values) & np.isfinite(numbers)
    smoothed = source in known()["smoothed"]["names"].split()
    steps_of_values = numbers[full].astype(int)
    return Series(values[full], steps_of_values, unit, source, smoothed=smoothed)


def _number(cell: Any) -> float:
    try:
        text = isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip())
        number = (
            math.nan
            if isinstance(cell, bool)
            else float(text[0].replace(",", "") if text else cell)
        )
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 2**53 else math.nan


def _of_wall_times(columns: Columns, unit: str | None) -> Series:
    """TensorBoard's export of a metric without a name: its values, if they agree with the times
    between them, in seconds or milliseconds; else these times.
    """
    wall, steps, values = ([_number(cell) for cell in columns[name]] for name in _TENSORBOARD)
    written = _series([*columns["value"]], [*columns["step"]], unit or "s", "Value")
    if unit is not None:
        return written
    pairs = np.diff(np.array([wall, steps]), axis=1)
    between = pairs[0] / np.where(pairs[1] > 0, pairs[1], np.nan)
    if not np.nanmax(between, initial=0.0) > 0:
        raise ValueError("its wall times do not rise; give `--unit` for its values")
    typical, value = float(np.nanmedian(between)), float(np.nanmedian(values))
    for name, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(value * factor - typical) < _AGREEMENT * typical:
            return _series(columns["value"], columns["step"], name, "Value")
    return _series([*between], columns["step"][1:], "s", "Wall time")


def columns_of_csv(text: str) -> Columns:
    """The table of a CSV file."""
    delimiter = _delimiter(text[:MOST_HEADER].partition("\n")[0])
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names, *rows = [row for row in rows if row] or [[]]
    if rows and len(rows[-1]) < len(names):  # It is still written.
        del rows[-1]
    for i, row in enumerate(rows):
        if len(row) < len(names) or any(row[len(names) :]):
            raise ValueError(
                f"row {i + 1} has {len(row)} cells and the first line {len(names)}; numbers with "
                "commas need quotes"
            )
    if delimiter == ";":  # Then a comma divides decimals.
        rows = [[_with_point(cell) for cell in row] for row in rows]
    # Of two runs with the same name both columns are kept: names of metrics end without spaces.
    unique = [name + " " * names[:i].count(name) for i, name in enumerate(names)]
    return {name: [row[i] for row in rows] for i, name in enumerate(unique)}


def _with_point(cell: str) -> str:
    return cell.replace(".", "").replace(",", ".") if _COMMA.fullmatch(cell) else cell


def _delimiter(line: str) -> str:
    """What divides the cells of a table, by its first line."""
    return max(",;\t", key=line.count)


def columns_of_json(text: str) -> Columns:
    """The table of a JSON file: of a list of metrics, of a line each, or of one summary; of
    TensorBoard's lists of wall time, step and value; or of the state of a `Trainer`, which has the
    time of all steps.
    """
    try:
        data = json.loads(text)
    except ValueError:
        data = [*_json_lines(text)]
    if isinstance(data, Mapping) and isinstance(history := data.get("log_history"), list):
        return _of_trainer(history, data.get("global_step"))
    rows = [data] if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        return {}
    if rows and isinstance(rows[-1], Mapping) and {"current_steps", "elapsed_time"} <= {*rows[-1]}:
        return _of_elapsed(rows)
    if rows and all(isinstance(row, list) and len(row) == 3 for row in rows):
        return {name: [row[i] for row in rows] for i, name in enumerate(_TENSORBOARD)}
    rows = [dict(_flat(row)) for row in rows if isinstance(row, Mapping)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _json_lines(text: str) -> Iterator[Any]:
    """What is written in each line; the last may be unfinished."""
    lines = [line for line in text.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        try:
            yield json.loads(line)
        except ValueError:
            if i == 0 or i < len(lines) - 1:
                raise


def _of_elapsed(rows: list[Any]) -> Columns:
    """The mean step of LLaMA-Factory's `trainer_log.jsonl`, which has the time since the start."""
    times = [
        (row.get("current_steps"), _clock(str(row.get("elapsed_time"))))
        for row in rows
        if isinstance(row, Mapping)
    ]
    (first, start), (last, end) = (times[0], times[-1]) if len(times) > 1 else ((0, 0.0), times[0])
    steps = _number(last) - _number(first)
    return {"step_time_s": [(end - start) / steps if steps else math.nan]}


def _clock(text: str) -> float:
    """The seconds of a time such as `1 day, 2:03:04`."""
    days, _, clock = text.rpartition("day")
    parts = [_number(part) for part in clock.lstrip("s, ").split(":")]
    seconds = sum(part * 60**i for i, part in enumerate(parts[::-1]))
    return seconds + 86400 * (_number(days) if days else 0)


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested metrics, by names with a `/`."""
    for name, value in row.items():
        if isinstance(value, Mapping) and len(before) < MOST_QUOTED:
            yield from _flat(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _of_trainer(history: list[Any], all_steps: Any) -> Columns:
    """The mean step of Transformers' `trainer_state.json`, which times all steps together."""
    entries = [entry for entry in history if isinstance(entry, Mapping)]
    total = next((entry for entry in entries[::-1] if "train_runtime" in entry), None)
    if total is None:
        raise ValueError(
            "this state of a Trainer has no `train_runtime`, which is written at the end of a run; "
            "give its log"
        )
    steps = _number(total.get("step", all_steps))
    return {"step_time_s": [_number(total["train_runtime"]) / steps if steps else math.nan]}


def columns_of_events(content: bytes) -> Columns:
    """The scalars of an event file of TensorBoard (tensorflow/core/util/event.proto): records of a
    length, a checksum of it, an event, and its checksum. The columns are filled by rows of a step.
    """
    rows: dict[int, dict[str, float]] = {}
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        if at and at + 12 + length > len(content):  # It is still written.
            break
        event = content[at + 12 : at + 12 + length]
        at += 16 + length
        step, scalars = _scalars(event)
        rows.setdefault(step, {}).update(scalars)
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns: Columns = {name: [row.get(name) for row in rows.values()] for name in names}
    return {"step": [*rows], **columns}


def _scalars(event: bytes) -> tuple[int, dict[str, float]]:
    """The step of an event, and its scalars: a `simple_value`, or a tensor of one number."""
    step, scalars = 0, {}
    for field, value in _fields(event):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            for number, entry in _fields(value):
                if number == 1 and isinstance(entry, bytes):
                    tag, scalar = _scalar(dict(_fields(entry)))
                    if scalar is not None:
                        scalars[tag] = scalar
    return step, scalars


def _scalar(entry: dict[int, Any]) -> tuple[str, float | None]:
    """The tag and the value of an entry of a summary."""
    tag = entry[1].decode("utf-8", "replace") if isinstance(entry.get(1), bytes) else ""
    if isinstance(entry.get(2), bytes) and len(entry[2]) == 4:
        return tag, struct.unpack("<f", entry[2])[0]
    tensor: dict[int, Any] = dict(_fields(entry[8])) if isinstance(entry.get(8), bytes) else {}
    content, form = tensor.get(4) or tensor.get(5) or tensor.get(6), _FLOATS.get(tensor.get(1, 0))
    if isinstance(content, bytes) and form and len(content) == struct.calcsize(form):
        return tag, struct.unpack(form, content)[0]
    return tag, None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message of protocol buffers: numbers, or bytes of what has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(message, at)
        if length is None or at + length > len(message):
            raise ValueError("it is no event file of TensorBoard, or damaged")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in seven bits of each byte, and the place behind it."""
    number = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise ValueError("it is no event file of TensorBoard, or damaged")
