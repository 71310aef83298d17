"""Reads exports of Nsight Systems: SQLite, one report per rank."""

import collections
import contextlib
import os
import re
import sqlite3
import time
import urllib.parse
from typing import BinaryIO

from .._misc import quoted
from ._spans import Kind, Message, RankTrace, SpanList, Spans


_MAGIC = b"SQLite format 3\0"
_TEXTS = "StringIds"
# The most bytes of a value, and seconds from one row to the next.
_MOST_OF_A_TEXT, _MOST_S_OF_A_ROW = 2**20, 4.0
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


def read_nsight(file: BinaryIO, time_unit: str | None = None) -> RankTrace:
    """Reads a report that `nsys export --type sqlite` wrote. Its times are in nanoseconds, so
    `time_unit` must be `ns`, if given.

    **Raises:**

    `ValueError` for a file that is not such a report, or has the kernels of several processes.
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
            spans, events = _read(database)
    except sqlite3.Error as error:
        raise ValueError(
            f"it cannot be read as a report of Nsight Systems ({quoted(str(error))}); export it "
            "again with `nsys export --type sqlite`."
        ) from None
    return RankTrace(spans, events, os.path.getsize(file.name))


def _read(database: sqlite3.Connection) -> tuple[Spans, dict[str, int]]:
    """The spans, and how many rows of each table they are from."""
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
    spans, processes = SpanList(), set()
    for table, (kind, name, place) in _TABLES.items():
        if table not in tables:
            continue
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        grid = "gridX || 'x' || gridY || 'x' || gridZ" if "gridX" in columns else "''"
        process = "globalPid" if "globalPid" in columns and kind == Kind.KERNEL else "0"
        # A range without an end is a mark.
        where = "WHERE end IS NOT NULL" if kind == Kind.RANGE else ""
        query = f"SELECT start, end, {name}, {grid}, {place}, {process} FROM {table} {where}"
        for start, end, text, size, lane, link, pid in database.execute(query):
            began[0] = time.monotonic()
            text = texts.get(text) if type(text) is int else text
            message = Message.of_kernel(str(text)) if kind == Kind.KERNEL else None
            text = str(text) if message or not size else f"{text} {size}"
            try:
                spans.add(kind, start, end, text, str(lane), link, message)
            except (TypeError, OverflowError):
                raise ValueError(
                    f"`{table}` has a row from {quoted(start)} to {quoted(end)} with the id "
                    f"{quoted(link)}, and these must be whole numbers in the order of time; export "
                    "the report again."
                ) from None
            processes |= {pid} if kind == Kind.KERNEL else set()
            events[table] += 1
    if len(processes) > 1:
        raise ValueError(
            f"it has the kernels of {len(processes)} processes; profile each rank into a report of "
            "its own."
        )
    if not events:
        raise ValueError("it has no kernels and no ranges; profile with `--trace=cuda,nvtx`.")
    return spans.spans(), dict(events)
