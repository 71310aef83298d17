"""Reads what profilers write, one file per rank: the JSON of the PyTorch profiler (Kineto), and
exports of Nsight Systems (SQLite).
"""

import collections
import contextlib
import dataclasses
import math
import os
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Container
from typing import Any, BinaryIO

import msgspec
import numpy as np

from .._misc import plural, quoted
from ._json_array import read_array
from ._spans import LEAST_CALL_NS, MOST_NS, UNITS, Kind, Message, RankTrace, SpanList, collective_of
from ._xla import XlaEvents


# The median call of an operator or of the driver takes from half a microsecond to half a
# millisecond; so a median that is a thousand times as long or as short is one of another unit.
_LEAST_CALL_S, _FEWEST_CALLS = 5e-7, 100
# What events of a category are, in the PyTorch profiler of 2021 and today, and on other devices.
# Other calls of a driver's categories than those that launch work may block the host.
_HOST, _RANGE, _OLD, _MODULE, _DEVICE, _COPY, _DRIVER = range(7)
_CATEGORIES = {"cpu_op": _HOST, "user_annotation": _RANGE, "operator": _OLD}
_CATEGORIES |= {"python_function": _MODULE}
_CATEGORIES |= dict.fromkeys(("kernel", "mtia_ccp_events", "hpu_op"), _DEVICE)
_CATEGORIES |= dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), _COPY)
_OTHER_DRIVERS = ("mtia", "xpu", "privateuse1", "glow")  # All of their calls launch work.
_DRIVERS = ("cuda", "hip", *_OTHER_DRIVERS)
_CATEGORIES |= {f"{of}_{api}": _DRIVER for of in _DRIVERS for api in ("runtime", "driver")}
_CATEGORIES |= {"runtime": _DRIVER}
_CATEGORIES |= {name.title(): kind for name, kind in _CATEGORIES.items()}
_STARTS = re.compile("Launch|Memcpy|Memset|EnqueueKernel")


class _Args(msgspec.Struct, gc=False):
    stream: Any = None
    correlation: Any = None
    outer: Any = msgspec.field(name="External id", default=None)
    outer_before_2023: Any = msgspec.field(name="external id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    members: Any = msgspec.field(name="Group size", default=None)
    size: Any = msgspec.field(name="In msg nelems", default=None)
    dtype: Any = None
    sequence: Any = msgspec.field(name="Seq", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"[]"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"[]"))
    name: Any = None
    tf_op: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    id: int | str | float | None = None
    args: _Args | None = None


def read_kineto(file: BinaryIO, time_unit: str | None = None) -> list[RankTrace]:
    """Reads a trace of the PyTorch profiler (`export_chrome_trace`) or of JAX's (`trace.json.gz`),
    plain or gzip.

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
    distributed = beside.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank, world_size = _whole(distributed.get("rank")), distributed.get("world_size")
    rank = rank if rank >= 0 else None
    if cut:
        number = sum(reader.events.values())
        reader.notes.append(f"the file ends early, after {plural(number, 'event')}")
    if devices := reader.xla.devices():
        return [
            RankTrace(spans, {} if i else dict(reader.events), 0 if i else size, cut=cut)
            for i, spans in enumerate(devices)
        ]
    spans, base = reader.spans.spans(), beside.get("baseTimeNanoseconds")
    if type(base) is int and len(spans):
        if not -MOST_NS <= int(spans.start.min()) + base <= int(spans.end.max()) + base <= MOST_NS:
            raise ValueError(
                f"its `baseTimeNanoseconds` of {quoted(base)} is beyond any clock; give the trace "
                "as it was recorded."
            )
        spans = dataclasses.replace(spans, start=spans.start + base, end=spans.end + base)
    host, notes = str(beside.get("host_name", "")), tuple(reader.notes)
    return [RankTrace(spans, dict(reader.events), size, rank, world_size, host, notes, cut)]


class _Reader:
    def __init__(self, time_unit: str | None):
        self.unit = UNITS[time_unit] if time_unit else 0
        self.spans = SpanList()
        self.events: collections.Counter[str] = collections.Counter()
        self.notes: list[str] = []
        self.sequences: dict[int, int] = {}  # The numbers of collectives by their host call.
        self.arrows: dict[object, tuple[str, int]] = {}  # Ends of arrows of autograd by their id.
        self.xla = XlaEvents()

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
                if event.cat is None:
                    self._add_xla(event, event.ts, event.dur)
                else:
                    self._add(event, event.ts, event.dur)
            elif event.cat == "fwdbwd" and event.ts is not None:
                self._add_arrow(event, event.ts)
            elif event.ph == "M" and event.args is not None:
                line = event.tid if event.name == "thread_name" else None
                if event.name in ("process_name", "thread_name"):
                    self.xla.name_line(event.pid, line, str(event.args.name))

    def _add_arrow(self, event: _Event, ts: float) -> None:
        """Adds an arrow with its second end, which may be either."""
        end = f"{event.pid}/{event.tid}", self._times(event, ts, 0)[0]
        opposite = self.arrows.pop((event.pid, event.id), None)
        if opposite is None:
            self.arrows[event.pid, event.id] = end
        elif (ends := (end, opposite) if event.ph == "s" else (opposite, end))[0][1] <= ends[1][1]:
            (lane, start), (_, until) = ends
            self.spans.add(Kind.ARROW, start, until, "fwdbwd", lane)

    def _add_xla(self, event: _Event, ts: float, dur: float) -> None:
        args = event.args or _NO_ARGS
        path = args.tf_op or args.name
        start, end = self._times(event, ts, dur)
        self.xla.add(event.pid, event.tid, str(event.name), start, end, str(path or ""))

    def _add(self, event: _Event, ts: float, dur: float) -> None:
        category = _CATEGORIES.get(event.cat or "")
        name, args = str(event.name), event.args or _NO_ARGS
        link, message, sequence = -1, None, -1
        if category is None or (category == _MODULE and not name.startswith("nn.Module: ")):
            return
        if category in (_DEVICE, _COPY):
            kind, link, sequence = Kind.KERNEL, _whole(args.correlation), _whole(args.sequence)
            if sequence < 0:
                outer = args.outer_before_2023 if args.outer is None else args.outer
                sequence = self.sequences.get(_whole(outer), -1)
            if args.collective is not None and category == _DEVICE:
                message = _message(args)
        elif category == _DRIVER:
            starts = args.correlation is not None and (
                _STARTS.search(name) or (event.cat or "").startswith(_OTHER_DRIVERS)
            )
            kind = Kind.LAUNCH if starts else Kind.CALL
            link = _whole(args.correlation)
            if kind == Kind.CALL and dur * self.unit < LEAST_CALL_NS:
                return
        elif args.collective is not None:
            kind, message, sequence = Kind.MESSAGE, _message(args), _whole(args.sequence)
            self.sequences[_whole(args.outer)] = sequence
        elif name.startswith(("gloo:", "nccl:")):
            kind, message = Kind.MESSAGE, _message_of_range(name, args)
        else:
            is_range = category in (_RANGE, _MODULE) or (category == _OLD and "::" not in name)
            kind = Kind.on_host(name, is_range)
        start, end = self._times(event, ts, dur)
        self.spans.add(kind, start, end, name, f"{event.pid}/{event.tid}", link, message, sequence)

    def _times(self, event: _Event, ts: float, dur: float) -> tuple[int, int]:
        """The start and end in nanoseconds."""
        if dur < 0:
            raise ValueError(
                f"`{str(event.name)[:40]}` lasts {dur:g}, and no event ends before it begins; "
                "profile again, or leave such events out."
            )
        try:
            start = round(ts * self.unit)
            end = start + round(dur * self.unit)
            if not -MOST_NS <= start <= end <= MOST_NS:
                raise OverflowError
        except OverflowError:
            raise ValueError(
                f"`{str(event.name)[:40]}` is at {ts:g}, which is beyond any clock; give the unit "
                "of its times with --time-unit."
            ) from None
        return start, end


_NO_ARGS = _Args()


def _message(args: _Args) -> Message:
    members, size = max(_whole(args.members), 0), max(_whole(args.size), 0)
    group = "" if args.group is None else str(args.group)
    return Message(collective_of(str(args.collective)), group, members, size, str(args.dtype or ""))


def _message_of_range(name: str, args: _Args) -> Message:
    """The message of a range such as `nccl:all_reduce`, which has the shapes of its inputs."""
    shapes, types = (msgspec.json.decode(raw) for raw in (args.shapes, args.types))
    rows = [row for row in shapes if isinstance(row, list)] if isinstance(shapes, list) else []
    size = sum(math.prod(max(_whole(length), 0) for length in row) for row in rows if row)
    dtype = str(types[0]) if isinstance(types, list) and types else ""
    return Message(collective_of(name), "", 0, min(size, 2**62), dtype)


def _whole(value: object) -> int:
    """A 64-bit integer, also from a string; -1 for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    return value if type(value) is int and abs(value) < 2**63 else -1


def _unit(events: list[_Event]) -> str:
    kinds = (_HOST, _OLD, _DRIVER)
    seconds = [e.dur for e in events if _CATEGORIES.get(e.cat or "") in kinds and e.dur is not None]
    if len(seconds) < _FEWEST_CALLS:
        return "us"
    median = float(np.median(seconds))
    possible = (u for u, ns in UNITS.items() if 1 <= median * ns * 1e-9 / _LEAST_CALL_S < 1000)
    return next(possible, "us")


_MAGIC = b"SQLite format 3\0"
_TEXTS = "StringIds"
# The most bytes of a value, and seconds from one row to the next.
_MOST_OF_A_TEXT, _MOST_S_OF_A_ROW = 2**20, 4.0
_OP_ID = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_STREAM, _THREAD = "streamId, correlationId", "globalTid, correlationId"
# The kind of span in each table, and the queries for its name and for its lane and link. A graph
# may be traced as a whole.
_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (Kind.KERNEL, "demangledName", _STREAM),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (Kind.KERNEL, "'memcpy'", _STREAM),
    "CUPTI_ACTIVITY_KIND_MEMSET": (Kind.KERNEL, "'memset'", _STREAM),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (Kind.KERNEL, "'graph'", _STREAM),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (Kind.LAUNCH, "nameId", _THREAD),
    "NVTX_EVENTS": (Kind.RANGE, "coalesce(text, textId)", "globalTid, -1"),
}


def read_nsight(file: BinaryIO, time_unit: str | None = None) -> list[RankTrace]:
    """Reads a report that `nsys export --type sqlite` wrote. Its times are in nanoseconds, so
    `time_unit` must be `ns`, if given. Each process that runs kernels is a rank, in the order of
    process ids.

    **Raises:**

    `ValueError` for a file that is not such a report.
    """
    if time_unit not in (None, "ns"):
        raise ValueError(
            f"times of Nsight Systems are in ns, but --time-unit is {time_unit}; leave it out."
        )
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(
            "this is not an SQLite file; export the report with `nsys export --type sqlite`."
        )
    name = urllib.parse.quote(os.path.abspath(file.name))
    try:
        # Nobody writes it, so that SQLite makes no files of its own beside it.
        uri = f"file:{name}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_OF_A_TEXT)
            processes, events = _read(database)
    except sqlite3.Error as error:
        raise ValueError(
            f"it cannot be read as a report of Nsight Systems ({quoted(str(error))}); export it "
            "again with `nsys export --type sqlite`."
        ) from None
    size = os.path.getsize(file.name)
    return [
        RankTrace(spans.spans(), {} if i else events, 0 if i else size)
        for i, spans in enumerate(processes)
    ]


def _read(database: sqlite3.Connection) -> tuple[list[SpanList], dict[str, int]]:
    """The spans of each process, and how many rows of each table they are from."""
    tables = dict(database.execute("SELECT name, type || ' ' || rootpage FROM sqlite_master"))
    for table in (*_TABLES, _TEXTS):
        if not re.fullmatch(r"table [1-9]\d*", tables.get(table, "table 1")):
            raise ValueError(
                f"its `{table}` is not a table of its own; export the report with `nsys export "
                "--type sqlite`."
            )
    events = collections.Counter[str]()
    began = [time.monotonic()]
    database.set_progress_handler(lambda: time.monotonic() - began[0] > _MOST_S_OF_A_ROW, 10_000)
    texts = {}
    if _TEXTS in tables:
        for number, text in database.execute(f"SELECT id, value FROM {_TEXTS}"):
            began[0] = time.monotonic()
            texts[number] = text
    processes = {pid: SpanList() for pid in _processes(database, tables) or [-1]}
    for table, (kind, name, place) in _TABLES.items():
        if table not in tables:
            continue
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        # The id of a thread has that of its process in its upper bits.
        owner = next((c for c in ("globalPid", "globalTid") if c in columns), "0")
        # A range without an end is a mark.
        where = "WHERE end IS NOT NULL" if kind == Kind.RANGE else ""
        query = f"SELECT start, end, {name}, {place}, {owner} FROM {table} {where}"
        for start, end, text, lane, link, pid in database.execute(query):
            began[0] = time.monotonic()
            text = texts.get(text) if type(text) is int else text
            text, of_row = str(text), kind
            if kind == Kind.LAUNCH and not _STARTS.search(text):
                of_row = Kind.CALL
            elif kind == Kind.RANGE:  # PyTorch's own end in the ids of its operators.
                text, *is_op = _OP_ID.split(text, maxsplit=1)
                of_row = Kind.on_host(text, not is_op and "aten::" not in text)
            process = pid >> 24 if type(pid) is int and -1 not in processes else -1
            if process not in processes:  # One that runs no kernels.
                continue
            try:
                processes[process].add(of_row, start, end, text, str(lane), link)
            except (TypeError, OverflowError):
                raise ValueError(
                    f"`{table}` has a row from {quoted(start)} to {quoted(end)} with the id "
                    f"{quoted(link)}, and these must be whole numbers in the order of time; export "
                    "the report again."
                ) from None
            events[table] += 1
    if not events:
        raise ValueError("it has no kernels and no ranges; profile with `--trace=cuda,nvtx`.")
    return [*processes.values()], dict(events)


def _processes(database: sqlite3.Connection, tables: Container[str]) -> list[int]:
    """The processes that run kernels, if there are several."""
    table = next(iter(_TABLES))
    columns = database.execute(f"PRAGMA table_info({table})") if table in tables else ()
    if not any(row[1] == "globalPid" for row in columns):
        return []
    rows = database.execute(f"SELECT DISTINCT globalPid FROM {table} ORDER BY globalPid")
    pids = sorted({pid >> 24 for (pid,) in rows if type(pid) is int})
    return pids if len(pids) > 1 else []
