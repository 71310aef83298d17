"""Reads exports of Nsight Systems: SQLite, one report per rank."""

import os
import sqlite3
import urllib.parse

from .._files import check_file, shown
from .._misc import quoted
from ._collective_names import collective_of_kernel
from ._spans import KERNEL, LAUNCH, RANGE, Message, RankTrace, SpanList


_MOST_BYTES = 2**42
_MAGIC = b"SQLite format 3\0"
# Tables of a device's work, with the query for its name; a graph may be traced as a whole.
_DEVICE = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "(SELECT value FROM StringIds WHERE id = demangledName)",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "'memcpy'",
    "CUPTI_ACTIVITY_KIND_MEMSET": "'memset'",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "'graph'",
}
_RUNTIME, _NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"


def read_nsight(path: str | os.PathLike[str], *, time_unit: str | None = None) -> RankTrace:
    """Reads a report that `nsys export --type sqlite` wrote. Its times are in nanoseconds.

    **Arguments:**

    - `path`: the file.
    - `time_unit`: must be `ns`, if given.

    **Raises:**

    `ValueError` for a file that is not such a report, or has the kernels of several processes.
    """
    if time_unit not in (None, "ns"):
        raise ValueError(
            f"{shown(path)}: times of Nsight Systems are in ns, but --time-unit is {time_unit}; "
            "leave it out."
        )
    _check(path)
    name = urllib.parse.quote(os.path.abspath(os.fspath(path)))
    try:
        database = sqlite3.connect(f"file:{name}?mode=ro", uri=True)
        try:
            return _read(database, path)
        finally:
            database.close()
    except sqlite3.Error as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read as a report of Nsight Systems "
            f"({quoted(str(error))}); export it again with `nsys export --type sqlite`."
        ) from None


def _check(path: str | os.PathLike[str]) -> None:
    try:
        check_file(path, _MOST_BYTES)
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise ValueError(f"{shown(path)}: there is no such file; give another.") from None
    except OSError as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read ({error.strerror}); give another file."
        ) from None
    if start != _MAGIC:
        raise ValueError(
            f"{shown(path)}: this is not an SQLite file; export the report with `nsys export "
            "--type sqlite`."
        )


def _read(database: sqlite3.Connection, path: str | os.PathLike[str]) -> RankTrace:
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
    events: dict[str, int] = {}
    spans = SpanList()
    processes = set()
    for table, name in _DEVICE.items():
        if table not in tables:
            continue
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        grid = "gridX || 'x' || gridY || 'x' || gridZ" if "gridX" in columns else "''"
        process = "globalPid" if "globalPid" in columns else "0"
        query = (
            f"SELECT start, end, {name}, {grid}, streamId, correlationId, {process} FROM {table}"
        )
        for start, end, kernel, size, stream, link, pid in database.execute(query):
            collective = collective_of_kernel(str(kernel))
            message = Message(collective) if collective else None
            text = str(kernel) if collective or not size else f"{kernel} {size}"
            spans.add(KERNEL, start, end, text, str(stream), link, message)
            processes.add(pid)
            events[table] = events.get(table, 0) + 1
    if len(processes) > 1:
        raise ValueError(
            f"{shown(path)}: it has the kernels of {len(processes)} processes; profile "
            "each rank into a report of its own."
        )
    if _RUNTIME in tables:
        query = (
            "SELECT start, end, (SELECT value FROM StringIds WHERE id = nameId), globalTid, "
            f"correlationId FROM {_RUNTIME}"
        )
        for start, end, call, thread, link in database.execute(query):
            spans.add(LAUNCH, start, end, str(call), str(thread), link)
            events[_RUNTIME] = events.get(_RUNTIME, 0) + 1
    if _NVTX in tables:
        query = (
            "SELECT start, end, coalesce(text, (SELECT value FROM StringIds WHERE id = textId)), "
            f"globalTid FROM {_NVTX} WHERE end IS NOT NULL"
        )
        for start, end, text, thread in database.execute(query):
            spans.add(RANGE, start, end, str(text), str(thread))
            events[_NVTX] = events.get(_NVTX, 0) + 1
    if not events:
        raise ValueError(
            f"{shown(path)}: it has no kernels and no ranges; profile with `--trace=cuda,nvtx`."
        )
    size = os.path.getsize(path)
    return RankTrace(os.fspath(path), None, None, "", spans.spans(), events, size, ())
