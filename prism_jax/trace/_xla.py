"""Reads what XLA's profiler writes of each device: the events of `trace.json.gz`, which the names
of processes and threads tell apart, and `xplane.pb` (openxla/xla, `xplane.proto`).
"""

import collections
import math
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from .._installed import needed
from ._protobuf import message_classes
from ._spans import BACKWARD, FORWARD, MOST_NS, OPTIMIZE, Kind, RankTrace, SpanList, Spans, is_copy


_MOST_OF_A_FILE = 2**31  # It is read at once.
_MODULES, _STEPS = "XLA Modules", "Steps"
_OPS = ("XLA Ops", "Async XLA Ops")
_DEVICE = re.compile(r"/device:(?!CPU)\w+:(\d+)(?: \(.*\))?")
_Event = tuple[str, int, int, str]  # Name, start, end, and the path of the operation.
# The fields that are read: of a plane, a line, an event, and the names of these.
_SCHEMA = {
    "Stat": "int64 metadata_id 1, string str_val 5, uint64 ref_val 7, int64 int64_val 4",
    "Event": "int64 metadata_id 1, int64 offset_ps 2, int64 duration_ps 3, Stat* stats 4",
    "Line": "string name 2, int64 timestamp_ns 3, Event* events 4, string display_name 11",
    "EventName": "int64 id 1, string name 2, string display_name 4, Stat* stats 5",
    "EventEntry": "int64 key 1, EventName value 2",
    "StatName": "int64 id 1, string name 2",
    "StatEntry": "int64 key 1, StatName value 2",
    "Plane": "string name 2, Line* lines 3, EventEntry* events 4, StatEntry* stats 5",
    "Space": "Plane* planes 1",
}


class XlaEvents:
    """The events of devices, by their lines."""

    def __init__(self):
        self._names: dict[tuple[Any, Any], str] = {}
        self._events = collections.defaultdict[tuple[Any, Any], list[_Event]](list)

    def name_line(self, process: Any, line: Any, name: str) -> None:
        """Names a process, or a line of it."""
        self._names[process, line] = name

    def add(self, process: Any, line: Any, name: str, start: int, end: int, path: str) -> None:
        self._events[process, line].append((name, start, end, path))

    def devices(self) -> list[Spans]:
        """The spans of each device that ran more than copies, in the order of their numbers."""
        numbered = {}
        for (process, line), name in self._names.items():
            if line is None and (match := _DEVICE.fullmatch(name)):
                lines = {
                    self._names.get((process, of), ""): events
                    for (owner, of), events in self._events.items()
                    if owner == process
                }
                spans = _spans(lines)
                if np.any((spans.kind == Kind.KERNEL) & ~spans.named(is_copy)):
                    numbered[int(match[1][:9]), str(process)] = spans
        return [numbered[key] for key in sorted(numbered)]


def _spans(lines: dict[str, list[_Event]]) -> Spans:
    """What the streams of a device ran or, if it has none, its operations; each run of the module
    that takes longest is a step, up to the next. Without modules, TensorFlow's steps are.
    """
    streams = {name: events for name, events in lines.items() if name.startswith("Stream")}
    streams = streams or {name: _leaves(lines[name]) for name in _OPS if name in lines}
    gradient = any("jvp" in path for events in streams.values() for *_, path in events)
    spans = SpanList()
    for stream, events in streams.items():
        for name, start, end, path in events:
            phase = BACKWARD if "transpose(" in path else FORWARD if "jvp" in path else -1
            phase = OPTIMIZE if phase < 0 and gradient and path else phase
            spans.add(Kind.KERNEL, start, end, name, stream, phase=phase)
    runs = collections.defaultdict[str, list[tuple[int, int]]](list)
    for name, start, end, _ in lines.get(_MODULES) or lines.get(_STEPS, []):
        runs[name if _MODULES in lines else _STEPS].append((start, end))
    if runs:
        longest = sorted(max(runs.values(), key=lambda run: sum(end - start for start, end in run)))
        starts = [start for start, _ in longest]
        last = max(
            longest[-1][1],
            starts[-1] + int(np.median([0, 0] if len(starts) < 2 else np.diff(starts))),
        )
        for i, (start, end) in enumerate(zip(starts, [*starts[1:], last], strict=True)):
            spans.add(Kind.RANGE, start, max(end, start), f"ProfilerStep#{i}", _MODULES)
    return spans.spans()


def _leaves(events: list[_Event]) -> list[_Event]:
    """The events that hold no other: a loop stands beside what it runs. Those that take no time are
    left out; they stand at the starts of others.
    """
    lasting = (event for event in events if event[1] < event[2])
    events = sorted(lasting, key=lambda event: (event[1], -event[2]))
    nexts = [*(start for _, start, *_ in events[1:]), math.inf]
    return [event for event, start in zip(events, nexts, strict=False) if start >= event[2]]


def read_xplane(file: BinaryIO, time_unit: str | None = None) -> list[RankTrace]:
    """Reads an `xplane.pb` of XLA's profiler, whose times are in ps; each device is a rank.

    **Raises:**

    `ValueError` for a file that cannot be read, or without a device.
    """
    DecodeError = needed("google.protobuf.message").DecodeError
    if time_unit is not None:
        raise ValueError("times of XLA's profiler are in ps; leave out --time-unit.")
    text = file.read(_MOST_OF_A_FILE + 1)
    if len(text) > _MOST_OF_A_FILE:
        raise ValueError("this is larger than the 2 GiB that are read; give a smaller file.")
    try:
        space = message_classes(_SCHEMA)["Space"].FromString(text)
    except DecodeError:
        raise ValueError("this is not an `xplane.pb` of XLA's profiler; give one.") from None
    events, number = XlaEvents(), 0
    for i, plane in enumerate(space.planes):
        if _DEVICE.fullmatch(plane.name):
            events.name_line(i, None, plane.name)
            number += _add_plane(events, i, plane)
    if not (devices := events.devices()):
        names = ", ".join(plane.name[:40] for plane in space.planes)
        raise ValueError(f"it has the planes {names!a:.200} and no work of a device; profile one.")
    return [
        RankTrace(spans, {} if i else {"XLA events": number}, 0 if i else len(text))
        for i, spans in enumerate(devices)
    ]


def _add_plane(events: XlaEvents, process: int, plane: Any) -> int:
    """Adds the events of a plane; how many it has."""
    stats = {entry.key: entry.value.name for entry in plane.stats}
    names = {entry.key: entry.value for entry in plane.events}
    paths = {key: _path(value.stats, stats) for key, value in names.items()}
    number = 0
    for i, line in enumerate(plane.lines):
        events.name_line(process, i, line.display_name or line.name)
        for event in line.events:
            start = line.timestamp_ns + round(event.offset_ps / 1000)
            end = start + round(event.duration_ps / 1000)
            if not -MOST_NS <= start <= end <= MOST_NS:
                raise ValueError("an event of it is beyond any clock; record the trace again.")
            named = names.get(event.metadata_id)
            # Without a short name it is the whole operation: `%fusion.3 = f32[8] fusion(...)`.
            name = (named.display_name or named.name) if named is not None else ""
            name = name.partition(" = ")[0].removeprefix("%")
            path = _path(event.stats, stats) or paths.get(event.metadata_id, "")
            events.add(process, i, name, start, end, path)
            number += 1
    return number


def _path(stats: Sequence[Any], names: dict[int, str]) -> str:
    """The path of an operation in the program, such as `jit(step)/jvp(Model)/dot_general`."""
    for stat in stats:
        if names.get(stat.metadata_id) in ("tf_op", "name"):
            return stat.str_val or names.get(stat.ref_val, "")
    return ""
