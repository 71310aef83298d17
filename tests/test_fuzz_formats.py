"""Damaged traces, graphs and schedules: each is read, or refused in one sentence.

`FUZZ_FROM=20000 pytest tests/test_fuzz_formats.py` damages them by other seeds.
"""

import contextlib
import copy
import functools as ft
import inspect
import json
import os
import pathlib
import random
import sqlite3

import pytest

import prism_jax as prism
from prism_jax.data import located
from prism_jax.logs import read_log
from prism_jax.measure import links_of_topology
from prism_jax.schedule import OneFOneB, load_schedule, save_schedule
from prism_jax.trace import contents, read_rank_traces

from .test_chakra import _json, _nodes, _protobuf
from .test_fuzz import _mutate, _read
from .test_kineto import _events
from .test_logs import LINES, _bar, _tables
from .test_nsight import _export
from .test_trace import _job, _made_trace, _plain
from .test_traces import _xspace


_FIRST = int(os.environ.get("FUZZ_FROM", "0"))
_MANY = range(_FIRST + 60, _FIRST + 660)
_SEEDS = [range(_FIRST, _FIRST + 60), pytest.param(_MANY, marks=pytest.mark.slow)]
_seeds = pytest.mark.parametrize("seeds", _SEEDS, ids=["few", "many"])
_NUMBERS = [
    *(None, True, "", "x", b"x", [], {}, 0, -1, 0.5, -0.0, 1e30, 1e308, -1e308, 5e-324),
    *(2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, "9" * 30, "Infinity"),
    *(
        float("inf"),
        float("nan"),
        [[]],
        ["x"],
        {"a": 1},
        "PP:0F999999999",
        "ProfilerStep#" + "7" * 22,
    ),
]


@pytest.fixture(scope="module")
def events():
    return _events(_made_trace(_job(), 2, _plain), 0, 0)


def _contents(format: str):
    return lambda path: contents(read_rank_traces(path, format))


def _with_others(value, rng: random.Random):
    """A table of JSON in which one to three values are others."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        inner = value
        while True:
            places = [*inner] if isinstance(inner, dict) else [*range(len(inner))]
            if not places:
                break
            place = rng.choice(places)
            if not isinstance(inner[place], dict | list) or not inner[place] or rng.random() < 0.1:
                other = copy.deepcopy(rng.choice(_NUMBERS))
                inner[place] = "bytes" if isinstance(other, bytes) else other
                break
            inner = inner[place]
    return value


@_seeds
def test_kineto(seeds, events, tmp_path):
    path = tmp_path / "rank0.json"
    own = {"distributedInfo": {"rank": 0, "world_size": 4}, "baseTimeNanoseconds": 10**18}
    host = {"ph": "X", "pid": 77, "ts": 1e8, "dur": 900.0}
    more = [
        host | {"cat": "cpu_op", "name": "autograd::engine::evaluate_function: A", "tid": 78},
        host | {"cat": "cuda_runtime", "name": "cudaFree", "tid": 77, "args": {"correlation": 9}},
        host | {"cat": "user_annotation", "name": "nccl:all_reduce", "tid": 77},
    ]
    whole = {**own, "traceEvents": events[:60] + more}
    for seed in seeds:
        rng = random.Random(seed)
        text = json.dumps(whole if seed % 3 == 0 else _with_others(whole, rng)).encode()
        path.write_bytes(_mutate(text, rng) if seed % 3 == 0 else text)
        _read(_contents("kineto"), path, seed)


@_seeds
def test_chakra(seeds, events, tmp_path):
    nodes = _nodes(events[:60])
    table = json.loads("[" + _json(nodes, rank=0).decode().replace("}\n{", "},{") + "]")
    content = _protobuf(nodes, rank=0, world_size=4)
    for seed in seeds:
        rng = random.Random(seed)
        path = tmp_path / ("rank0.json" if seed % 2 else "rank0.et")
        text = "\n".join(map(json.dumps, _with_others(table, rng)))
        path.write_bytes(text.encode() if seed % 2 else _mutate(content, rng))
        _read(_contents("chakra"), path, seed)
        path.unlink()


@_seeds
def test_nsight(seeds, events, tmp_path):
    path = tmp_path / "rank0.sqlite"
    _export(path, events[:60])
    whole = path.read_bytes()
    for seed in seeds:
        rng = random.Random(seed)
        path.write_bytes(whole if seed % 4 else _mutate(whole, rng))
        if seed % 4:
            with contextlib.closing(sqlite3.connect(path)) as database, database:
                tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master")]
                table = rng.choice(tables)
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                column, other = rng.choice(columns), rng.choice(_NUMBERS)
                if seed % 4 == 1:
                    database.execute(f"ALTER TABLE {table} RENAME TO other")
                    chosen = ", ".join("1" if name == column else name for name in columns)
                    database.execute(f"CREATE VIEW {table} AS SELECT {chosen} FROM other")
                elif not isinstance(other, int) or abs(other) < 2**63:
                    other = str(other) if isinstance(other, list | dict) else other
                    database.execute(
                        f"UPDATE {table} SET {column} = ? WHERE rowid % 7 = ?",
                        (other, rng.randrange(7)),
                    )
            database.close()
        _read(_contents("nsight"), path, seed)


_SCRIPTS = sorted((pathlib.Path(__file__).parent / "data/scripts").iterdir())


@_seeds
def test_files_of_frameworks(seeds, tmp_path):
    """Scripts, YAML, TOML, JSON and printed arguments, in turn."""
    for seed in seeds:
        rng = random.Random(seed)
        script = _SCRIPTS[seed % len(_SCRIPTS)]
        path = tmp_path / script.name
        text = script.read_bytes()
        if script.suffix == ".json" and rng.random() < 0.5:
            text = json.dumps(_with_others(json.loads(text), rng)).encode()
        path.write_bytes(_mutate(text, rng))
        _read(_import, path, seed)


def _import(path):
    """All that is in the way is a list, of which each clause is short."""
    try:
        prism.importers.import_job(path, 8, batch=64)
    except prism.importers.NotImportableError as error:
        raise ValueError(f"{path}: {max(error.reasons, key=len)}.") from None


@_seeds
def test_logs(seeds, tmp_path):
    """Lines of each framework, progress bars, and tables of metrics, in turn."""
    times = [3.1, 3.2, 3.05, 3.15, 9.0, 3.1, 3.12, 3.08]
    files = {
        f"{i}.log": "\n".join(line(k, s) for k, s in enumerate(times)).encode()
        for i, line in enumerate(LINES.values())
    }
    files["bars.log"] = "\r".join(_bar(k, 8, f"{s}s/it") for k, s in enumerate(times)).encode()
    tables = {
        "trainer_log.jsonl": '{"current_steps": 1, "elapsed_time": "0:00:03"}\n' * 2,
        "trainer_state.json": json.dumps(
            {"log_history": [{"train_runtime": 18.4, "step": 6}], "global_step": 6}
        ),
    } | _tables(times)
    files |= {k: v if isinstance(v, bytes) else v.encode() for k, v in tables.items()}
    for seed in seeds:
        rng = random.Random(seed)
        name = [*files][seed % len(files)]
        content, path = files[name], tmp_path / name
        if name.endswith(".json") and rng.random() < 0.5:
            content = json.dumps(_with_others(json.loads(content), rng)).encode()
        else:
            content = _mutate(content, rng)
        path.write_bytes(content)
        options = {"column": "rate", "unit": "samples/s"} if name == "rates.csv" else {}
        _read(lambda path, options=options: read_log(path, _log_job(), **options), path, seed)


@ft.cache
def _log_job():
    return prism.data.load_job("examples/job.toml")


_NCCL = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong
     8388608       2097152     float     sum      -1    210.0   39.95   74.90      0
    33554432       8388608     float     sum      -1    420.0   79.89  149.80      0
  8589934592    2147483648     float     sum      -1  44000.0  195.23  366.05      0
"""


_TOPOLOGY = """
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV4\tSYS\tPXB\t0-47
GPU1\tNV4\t X \tNV4\tPXB\t0-47
GPU2\tSYS\tNV4\t X \tSYS\t48-95
NIC0\tPXB\tPXB\tSYS\t X
"""


_TEXTS = [
    (_NCCL, prism.measure.nccl_test_of),
    (_TOPOLOGY, lambda text, _: links_of_topology(text, "h100-sxm")),
]


@_seeds
@pytest.mark.parametrize(("whole", "read"), _TEXTS, ids=["nccl-tests", "topologies"])
def test_texts_of_machines(seeds, whole, read, tmp_path):
    for seed in seeds:
        path = tmp_path / "out.txt"
        path.write_bytes(_mutate(whole.encode(), random.Random(seed)))
        _read(ft.partial(_text, read), path, seed)


def _text(read, path):
    with located(str(path)):
        try:
            read(path.read_text(errors="replace"), path.name)
        except ValueError as error:
            raise ValueError(f"{error}.") from None


def _xla_events():
    """Two steps of what JAX's profiler writes of a device."""
    lines = {None: "/device:GPU:0", 11: "Stream #11(Compute)", 13: "XLA Modules"}
    for tid, name in lines.items():
        of = {"name": "thread_name", "tid": tid} if tid else {"name": "process_name"}
        yield {"ph": "M", "pid": 1, **of, "args": {"name": name}}
    for step in range(2):
        at = 100.0 * step
        yield {"ph": "X", "pid": 1, "tid": 13, "ts": at, "dur": 90, "name": "jit_f", "args": {}}
        for i, path in enumerate(("jvp(A)/dot", "transpose(jvp(A))/dot", "add")):
            event = {"ph": "X", "pid": 1, "tid": 11, "ts": at + 30 * i, "dur": 30.0}
            yield event | {"name": f"fusion_{i}", "args": {"tf_op": path}}


@_seeds
def test_xla(seeds, tmp_path):
    events = [*_xla_events()]
    content = _xspace(events)
    for seed in seeds:
        rng = random.Random(seed)
        path = tmp_path / ("rank0.json" if seed % 2 else "a.xplane.pb")
        text = json.dumps({"traceEvents": _with_others(events, rng)})
        path.write_bytes(text.encode() if seed % 2 else _mutate(content, rng))
        _read(lambda path: contents(read_rank_traces(path)), path, seed)
        path.unlink()


@_seeds
def test_graphs(seeds, tmp_path):
    compile_graph = inspect.unwrap(prism.compile_graph)
    laws = [1.0, 0.0, prism.latency.LogNormal(1.0, 0.1), prism.latency.Gamma(1.0, 0.1)]
    for seed in seeds:
        rng = random.Random(seed)
        ops = [
            {"latency": rng.choice(laws), "after": [*range(i)][-2:], "rank": i % 2}
            for i in range(rng.randrange(1, 6))
        ]
        options = {"ops": ops, "sinks": None, "num_replicas": 1, "network_links": []}
        for _ in range(rng.choice((1, 1, 2))):
            where = rng.choice([*ops, *ops, options])
            name = rng.choice(["kind", "link", "microbatch", *where] if where in ops else [*where])
            other = rng.choice(_NUMBERS)
            if name == "ops":
                continue
            where[name] = [other] if rng.random() < 0.3 else other
        given = options | {"ops": [prism.Op(**op) for op in ops]}
        _read(lambda _, given=given: compile_graph(**given), tmp_path, (seed, given))


@_seeds
def test_schedules(seeds, tmp_path):
    path = tmp_path / "schedule.csv"
    save_schedule(OneFOneB(3, 5), path)
    whole = path.read_bytes()
    for seed in seeds:
        rng = random.Random(seed)
        content = _mutate(whole, rng)
        if seed % 2:
            number = str(rng.choice(_NUMBERS)).encode()
            content = whole.replace(rng.choice((b"0", b"1", b"2", b"F", b"B")), number, 1)
        path.write_bytes(content)
        _read(load_schedule, path, seed)
