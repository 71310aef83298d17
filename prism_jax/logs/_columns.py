"""Tables of metrics: CSV and JSON as W&B, TensorBoard and Transformers write them, and event files.

A table is its columns by their names, each a list of texts or numbers, some of them empty.
"""

import csv
import io
import json
import math
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
    names = [name for name in columns if not name.endswith(_SCATTER)]
    lower = {name: _metric(name) for name in names}
    if column is None and set(_TENSORBOARD) <= {*lower.values()}:
        return [_of_wall_times({lower[name]: columns[name] for name in names}, unit)]
    units = {name: unit for unit, text in known()["columns"].items() for name in text.split()}
    last_parts = {name.rpartition("/")[2]: unit for name, unit in [*units.items()][::-1]}
    units |= {name: unit for name, unit in last_parts.items() if name not in {*units, *_STEPS}}
    wanted = list(units) if column is None else [column.lower()]
    metric = next((metric for metric in wanted if metric in lower.values()), None)
    metric = metric or next((name.lower() for name in names if name == column), None)
    if metric is None:
        there = quoted(", ".join(names), 2 * MOST_QUOTED) or "none"
        if column is None:
            raise ValueError(
                f"no column is known to be a step time, among {there}; give `--column` and `--unit`"
            )
        raise ValueError(f"there is no column `{quoted(column)}`; it has {there}")
    unit = unit or units.get(metric)
    if unit is None:
        raise ValueError(f"the unit of `{quoted(metric)}` is not known; give `--unit`")
    of_runs = [name for name in names if lower[name] == metric or name.lower() == metric]
    steps = next((columns[name] for name in names if lower[name] in _STEPS), None)
    series = [_series(columns[name], steps, unit, metric) for name in of_runs]
    return [each_run for each_run in series if len(each_run.values)]


def _metric(name: str) -> str:
    """The metric of a column, which W&B writes after the name of its run."""
    return name.rpartition(" - ")[2].strip().lower()


def _series(cells: list[Any], steps: list[Any] | None, unit: str, source: str) -> Series:
    """A series of the cells that hold a number."""
    values = np.array([_number(cell) for cell in cells], float)
    numbers = np.arange(1, len(cells) + 1) if steps is None else np.array([*map(_number, steps)])
    full = np.isfinite(values) & np.isfinite(numbers)
    return Series(values[full], numbers[full].astype(int), unit, source)


def _number(cell: Any) -> float:
    try:
        number = float(cell)
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
    if not np.any(np.isfinite(between)):
        raise ValueError("it has one time; give `--unit` for its values")
    typical, value = float(np.nanmedian(between)), float(np.median(values))
    for name, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(value * factor / typical - 1) < _AGREEMENT:
            return _series(columns["value"], columns["step"], name, "Value")
    return _series([*between], columns["step"][1:], "s", "Wall time")


def columns_of_csv(text: str) -> Columns:
    """The table of a CSV file."""
    rows = csv.reader(io.StringIO(text))
    names = next(rows, [])
    cells = [row for row in rows if len(row) == len(names)]
    return {name: [row[i] for row in cells] for i, name in enumerate(names)}


def columns_of_json(text: str) -> Columns:
    """The table of a JSON file: of a list of metrics, of a line each, or of one summary; of
    TensorBoard's lists of wall time, step and value; or of the state of a `Trainer`, which has the
    time of all steps.
    """
    try:
        data = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(data, Mapping) and isinstance(history := data.get("log_history"), list):
        return _of_trainer(history)
    rows = [data] if isinstance(data, Mapping) else data
    if rows and all(isinstance(row, list) and len(row) == 3 for row in rows):
        return {name: [row[i] for row in rows] for i, name in enumerate(_TENSORBOARD)}
    rows = [dict(_flat(row)) for row in rows if isinstance(row, Mapping)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested metrics, by names with a `/`."""
    for name, value in row.items():
        if isinstance(value, Mapping) and len(before) < MOST_QUOTED:
            yield from _flat(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _of_trainer(history: list[Any]) -> Columns:
    """The mean step of Transformers' `trainer_state.json`, which times all steps together."""
    entries = [entry for entry in history if isinstance(entry, Mapping)]
    total = next((entry for entry in entries[::-1] if "train_runtime" in entry), None)
    if total is None:
        raise ValueError(
            "this state of a Trainer has no `train_runtime`, which is written at the end of a run; "
            "give its log"
        )
    steps = _number(total.get("step"))
    return {"step_time_s": [_number(total["train_runtime"]) / steps if steps else math.nan]}


def columns_of_events(content: bytes) -> Columns:
    """The scalars of an event file of TensorBoard (tensorflow/core/util/event.proto): records of a
    length, a checksum of it, an event, and its checksum. The columns are filled by rows of a step.
    """
    rows: dict[int, dict[str, float]] = {}
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        event = content[at + 12 : at + 12 + length]
        at += 16 + length
        step, scalars = _scalars(event)
        rows.setdefault(step, {}).update(scalars)
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns: Columns = {name: [row.get(name) for row in rows.values()] for name in names}
    return {"step": [*rows], **columns}


def _scalars(event: bytes) -> tuple[int, dict[str, float]]:
    """The step of an event, and its scalars: a `simple_value`, or a tensor of one float."""
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
    tag = entry.get(1, b"").decode("utf-8", "replace")
    if isinstance(entry.get(2), bytes) and len(entry[2]) == 4:
        return tag, struct.unpack("<f", entry[2])[0]
    tensor = dict(_fields(entry[8])) if isinstance(entry.get(8), bytes) else {}
    content = tensor.get(4) or tensor.get(5)
    if isinstance(content, bytes) and len(content) == 4:
        return tag, struct.unpack("<f", content)[0]
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
