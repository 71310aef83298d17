import contextlib
import itertools as it
import sqlite3

import numpy as np
import pytest

from prism_jax.trace import read_profile_traces, read_rank_traces

from .helpers import refusal
from .test_kineto import _events
from .test_trace import _job, _made_trace, _plain


_KERNELS, _CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def _export(path, *ranks):
    """The events of Kineto traces as Nsight Systems exports them, of one process each."""
    names: dict[str, int] = {}
    tables: dict[str, list] = {"kernel": [], "cuda_runtime": [], "user_annotation": []}
    for i, e in ((i, e) for i, events in enumerate(ranks, 1) for e in events):
        start, end = round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))
        # NVTX has no name for a step of PyTorch, but may be given one.
        name = names.setdefault(e["name"], len(names))
        link = e["args"].get("correlation", -1)
        lane = e["tid"] + (0 if e["cat"] == "kernel" else i << 24)
        tables[e["cat"]].append((start, end, name, lane, link, i << 24))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE StringIds (id, value)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in names.items()])
        db.execute(
            f"CREATE TABLE {_KERNELS} "
            "(start, end, demangledName, streamId, correlationId, globalPid, gridX, gridY, gridZ)"
        )
        rows = tables["kernel"]
        db.executemany(f"INSERT INTO {_KERNELS} VALUES (?, ?, ?, ?, ?, ?, 1, 2, 3)", rows)
        db.execute(f"CREATE TABLE {_CALLS} (start, end, nameId, globalTid, correlationId)")
        rows = [row[:5] for row in tables["cuda_runtime"]]
        db.executemany(f"INSERT INTO {_CALLS} VALUES (?, ?, ?, ?, ?)", rows)
        db.execute("CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid)")
        rows = [row[:4] for row in tables["user_annotation"]]
        db.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, NULL, ?, ?)", rows)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 'a mark', NULL, 1)")
    db.close()


def _create(path, table):
    database = sqlite3.connect(path)
    database.execute(table)
    database.close()


def test_a_report_of_nsight_systems_has_the_same_ops(tmp_path):
    made = _made_trace(_job(), 5, _plain)
    for rank in range(4):
        _export(tmp_path / f"rank{rank}.sqlite", _events(made, rank % 2, rank // 2))
    trace = read_profile_traces(tmp_path, made.job, "nsight")
    assert trace.steps.tolist() == made.steps.tolist()
    for op, end in made.end.items():
        np.testing.assert_allclose(trace.end[op] - 1e-4, end, atol=2e-8)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"NSYS"), "this is not an SQLite file"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + 999 * b"x"), "cannot be read"),
        (lambda path: _create(path, "CREATE TABLE a (b)"), "no kernels"),
        (lambda path: None, "there is no such file"),
    ],
)
def test_bad_nsight_reports_are_refused_in_one_sentence(tmp_path, refused, write, message):
    write(tmp_path / "a.sqlite")
    error = refused(["trace", str(tmp_path / "a.sqlite"), "--format", "nsight"])
    assert message in error


def test_the_processes_of_a_report_are_ranks(tmp_path):
    made = _made_trace(_job(), 2, _plain)
    _export(tmp_path / "a.sqlite", *(_events(made, rank % 2, rank // 2) for rank in range(4)))
    trace = read_profile_traces(tmp_path, made.job)
    for op, end in made.end.items():
        np.testing.assert_allclose(trace.end[op] - 1e-4, end, atol=2e-8)


_COLUMNS = "start, end, demangledName, streamId, correlationId, globalPid"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *it.product(("start", "end"), (None, "soon", 1.5, b"1", -(2**63), 2**63 - 1)),
        *it.product(("correlationId",), (None, "soon", 1.5, b"1")),
    ],
)
def test_rows_without_times_are_refused(tmp_path, column, value):
    row = {"start": 1, "end": 2, "demangledName": 0, "streamId": 7, "correlationId": 3}
    row |= {"globalPid": 1, column: value}
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute(f"CREATE TABLE {_KERNELS} ({_COLUMNS})")
        db.execute(f"INSERT INTO {_KERNELS} VALUES (?, ?, ?, ?, ?, ?)", [*row.values()])
    db.close()
    with pytest.raises(ValueError, match=rf"`{_KERNELS}` has a row from .* whole numbers"):
        list(read_rank_traces(tmp_path / "a.sqlite", "nsight"))


@pytest.mark.parametrize(
    "create",
    [
        f"CREATE VIEW {_KERNELS} AS WITH RECURSIVE a(x) AS (SELECT 1 UNION ALL SELECT x FROM a)"
        " SELECT x AS start, x AS end FROM a",
        "CREATE VIEW StringIds AS SELECT 1 AS id, zeroblob(900000000) AS value",
    ],
)
def test_views_and_virtual_tables_are_refused(tmp_path, create):
    made = _made_trace(_job(), 2, _plain)
    _export(tmp_path / "a.sqlite", _events(made, 0, 0))
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute(f"DROP TABLE {create.split()[2]}")
        db.execute(create)
    db.close()
    with pytest.raises(ValueError, match="is not a table of its own"):
        list(read_rank_traces(tmp_path / "a.sqlite", "nsight"))


def test_a_value_that_is_computed_and_large_is_refused(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute(
            f"CREATE TABLE {_KERNELS} (start, end, streamId, correlationId, globalPid, "
            "demangledName AS (zeroblob(900000000)))"
        )
        db.execute(
            f"INSERT INTO {_KERNELS} (start, end, streamId, correlationId, globalPid) "
            "VALUES (1, 2, 3, 4, 5)"
        )
    db.close()
    refusal(lambda: list(read_rank_traces(tmp_path / "a.sqlite", "nsight")), "too big")


def test_reading_leaves_no_file_behind(tmp_path):
    made = _made_trace(_job(), 2, _plain)
    _export(tmp_path / "a.sqlite", _events(made, 0, 0))
    with contextlib.closing(sqlite3.connect(tmp_path / "a.sqlite")) as db, db:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    list(read_rank_traces(tmp_path / "a.sqlite", "nsight"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.sqlite"]
