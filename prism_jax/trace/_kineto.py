"""Reads traces of the PyTorch profiler: Kineto's JSON, one file per rank."""

import collections
import dataclasses
import re
from typing import Any, BinaryIO

import msgspec
import numpy as np

from .._misc import counted, quoted
from ._json_array import read_array
from ._spans import MOST_NS, UNITS, Kind, Message, RankTrace, SpanList, collective_of


# The median call of an operator or of the driver takes from half a microsecond to half a
# millisecond; so a median that is a thousand times as long or as short is one of another unit.
_LEAST_CALL_S, _FEWEST_CALLS = 5e-7, 100
_CALLS = ("cpu_op", "cuda_runtime", "hip_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STARTS = re.compile("Launch|Memcpy|Memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")


class _Args(msgspec.Struct, gc=False):
    stream: Any = None
    correlation: Any = None
    grid: Any = None
    outer: Any = msgspec.field(name="External id", default=None)
    outer_before_2023: Any = msgspec.field(name="external id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    members: Any = msgspec.field(name="Group size", default=None)
    size: Any = msgspec.field(name="In msg nelems", default=None)
    dtype: Any = None
    sequence: Any = msgspec.field(name="Seq", default=None)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: _Args | None = None


def read_kineto(file: BinaryIO, time_unit: str | None = None) -> RankTrace:
    """Reads a trace of the PyTorch profiler (`export_chrome_trace`), plain or gzip.

    Memory grows with the number of ranges, kernels and calls (about 50 bytes each), not with the
    text. A file that ends early is read as far as it goes, with a note.

    **Arguments:**

    - `file`: the open file.
    - `time_unit`: the unit of `ts` and `dur`: `s`, `ms`, `us` or `ns`. By default microseconds,
        unless the calls in the file would then be a thousand times too long or too short.

    **Raises:**

    `ValueError` for a file that cannot be read or is not such a trace.
    """
    reader = _Reader(time_unit)
    beside, size, cut = read_array(file, "traceEvents", _Event, reader.add)
    if not reader.events:
        why = "it ends early, before its first event" if cut else "it has no events"
        raise ValueError(f"{why}; give a trace as it was recorded.")
    own = beside.get("distributedInfo")
    own = own if isinstance(own, dict) else {}
    rank, world_size = _whole(own.get("rank")), own.get("world_size")
    rank = rank if rank >= 0 else None
    if cut:
        number = sum(reader.events.values())
        reader.notes.append(f"the file ends early, after {counted(number, 'event')}")
    spans, base = reader.spans.spans(), beside.get("baseTimeNanoseconds")
    if type(base) is int and len(spans):
        if not -MOST_NS <= int(spans.start.min()) + base <= int(spans.end.max()) + base <= MOST_NS:
            raise ValueError(
                f"its `baseTimeNanoseconds` of {quoted(base)} is beyond any clock; give the trace "
                "as it was recorded."
            )
        spans = dataclasses.replace(spans, start=spans.start + base, end=spans.end + base)
    host, notes = str(beside.get("host_name", "")), tuple(reader.notes)
    return RankTrace(spans, dict(reader.events), size, rank, world_size, host, notes, cut)


class _Reader:
    def __init__(self, time_unit: str | None):
        self.unit = UNITS[time_unit] if time_unit else 0
        self.spans = SpanList()
        self.events: collections.Counter[str] = collections.Counter()
        self.notes: list[str] = []
        self.sequences: dict[int, int] = {}  # The numbers of collectives by their host call.

    def add(self, events: list[_Event]) -> None:
        if not self.unit:
            self.unit = UNITS[unit := _unit(events)]
            if unit != "us":
                self.notes.append(
                    f"times are read in {unit}, because calls would else be too long or too short"
                )
        self.events.update(event.cat or "other" for event in events)
        for event in events:
            if event.ph == "X" and event.ts is not None and event.dur is not None:
                self._add(event, event.ts, event.dur)

    def _add(self, event: _Event, ts: float, dur: float) -> None:
        category = event.cat
        name, args = str(event.name), event.args or _NO_ARGS
        link, message, sequence = -1, None, -1
        if category in ("user_annotation", "cpu_op"):
            if args.collective is not None:
                kind, message, sequence = Kind.MESSAGE, _message(args), _whole(args.sequence)
                self.sequences[_whole(args.outer)] = sequence
            elif name.startswith("gloo:"):
                kind, message = Kind.MESSAGE, Message(collective_of(name))
            else:
                kind = Kind.on_host(name, category == "user_annotation")
        elif category in _DEVICE:
            kind, link, sequence = Kind.KERNEL, _whole(args.correlation), _whole(args.sequence)
            if sequence < 0:
                outer = args.outer_before_2023 if args.outer is None else args.outer
                sequence = self.sequences.get(_whole(outer), -1)
            if args.collective is not None:
                message = _message(args)
            elif category == "kernel":
                message = Message.of_kernel(name)
            if isinstance(args.grid, list):  # A kernel of another size counts as another kernel.
                name = f"{name} {'x'.join(map(str, args.grid[:3]))}"
        elif category in _LAUNCHES and args.correlation is not None and _STARTS.search(name):
            kind, link = Kind.LAUNCH, _whole(args.correlation)
        else:
            return
        if dur < 0:
            raise ValueError(
                f"`{name[:40]}` lasts {dur:g}, and no event ends before it begins; profile again, "
                "or leave such events out."
            )
        try:
            start, lane = round(ts * self.unit), f"{event.pid}/{event.tid}"
            end = start + round(dur * self.unit)
            self.spans.add(kind, start, end, name, lane, link, message, sequence)
        except OverflowError:
            raise ValueError(
                f"`{name[:40]}` is at {ts:g}, which is beyond any clock; give the unit of its "
                "times with --time-unit."
            ) from None


_NO_ARGS = _Args()


def _message(args: _Args) -> Message:
    members, size = max(_whole(args.members), 0), max(_whole(args.size), 0)
    group = "" if args.group is None else str(args.group)
    return Message(collective_of(str(args.collective)), group, members, size, str(args.dtype or ""))


def _whole(value: object) -> int:
    """A 64-bit integer, also from a string; -1 for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    return value if type(value) is int and abs(value) < 2**63 else -1


def _unit(events: list[_Event]) -> str:
    seconds = [e.dur for e in events if e.cat in _CALLS and e.dur is not None]
    if len(seconds) < _FEWEST_CALLS:
        return "us"
    median = float(np.median(seconds))
    possible = (u for u, ns in UNITS.items() if 1 <= median * ns * 1e-9 / _LEAST_CALL_S < 1000)
    return next(possible, "us")
