"""Small profiles, one for each kind of fault, with what must come out of them."""

import json
import pathlib
import re

import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.diagnosis import measured_beside
from prism_jax.prediction import predict
from prism_jax.trace import contents, median_steps, read_profile_traces, read_rank_traces
from prism_jax.trace._protobuf import message_classes
from prism_jax.trace._rank_ops import rank_ops
from prism_jax.trace._spans import Kind, RankTrace, SpanList
from prism_jax.trace._trace import KernelRule, RangeNames
from prism_jax.trace._xla import _SCHEMA, XlaEvents


_ROOT = pathlib.Path(__file__).parents[1]


_MS = {
    "t01_unmarked.json": {"forward": 3, "backward": 5, "optimizer": 1, "idle_s": 1},
    "t02_host_ahead.json": {"forward": 3, "backward": 6, "optimizer": 0.99, "idle_s": 0.01},
    "t03_all_to_all.json": {"communication_s": 5.5, "exposed_s": 3.5, "compute_s": 6},
    "t04_side_stream.json": {"forward": 3, "backward": 5, "optimizer": 1, "copies": 2},
    "t05_two_optimizers.json": {"forward": 3, "backward": 5, "optimizer": 1.5},
    "t06_unnamed_collectives.json": {
        "compute_s": 7.8,
        "communication_s": 6,
        "exposed_s": 2,
        "idle_s": 0.2,
    },
    "t07_xla.json": {
        "compute_s": 8,
        "forward": 3,
        "backward": 4,
        "optimizer": 1,
        "communication_s": 3,
        "exposed_s": 1,
        "idle_s": 1,
    },
    "t08_old_categories.json": {"forward": 3, "backward": 5, "optimizer": 1},
    "t09_graph.json": {"compute_s": 9, "communication_s": 3.5, "exposed_s": 0.5, "idle_s": 0.5},
    "t10_blocked_host.json": {"idle_s": 6.14},
    "t11_two_processes.sqlite": {"forward": 3, "backward": 4, "optimizer": 1, "exposed_s": 1.5},
    "t13_torchrec_names.json": {"forward": 3, "backward": 5, "optimizer": 1},
}
_STEPS = {"t02_host_ahead.json": 6, "t09_graph.json": 3}
_RANKS = {"t03": 4, "t06": 8, "t09": 2, "t11": 2}
_COLLECTIVES = {
    "t03_all_to_all.json": [("all_to_all", 3.0, 3.0), ("all_reduce", 2.5, 0.5)],
    "t06_unnamed_collectives.json": [
        *[("all_to_all", 3.5, 0.5), ("unknown", 1.5, 0.5), ("all_reduce", 1.0, 1.0)]
    ],
    "t07_xla.json": [("all_reduce", 3.0, 1.0)],
    "t09_graph.json": [("all_reduce", 3.5, 0.5)],
    "t11_two_processes.sqlite": [("all_reduce", 1.5, 1.5)],
}


def _run(words, capsys):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", _MS)
def test_where_the_time_of_a_step_goes(name, shared, tmp_path, refused, capsys):
    path = shared / "cases/traces" / name
    found = _run(["trace", path], capsys)
    assert found["training"] is (None if name == "t09_graph.json" else True)
    assert found["steps"] == len(found["step_times_s"]) == _STEPS.get(name, 5)
    assert found["step_times_s"] == pytest.approx([10e-3] * found["steps"], rel=0.02)
    assert found["step_time_s"] == pytest.approx(10e-3, rel=0.001)
    assert found["step_cv"] == (None if found["steps"] < 4 else pytest.approx(0, abs=1e-3))
    parts = found["split"] | (found["phases"] or {})
    assert {part: 1e3 * parts[part] for part in _MS[name]} == pytest.approx(_MS[name], rel=0.02)
    rows = [(row["kind"], row["seconds"], row["exposed_s"]) for row in found["collectives"]]
    assert [kind for kind, *_ in rows] == [kind for kind, *_ in _COLLECTIVES.get(name, [])]
    for (_, *ours), (_, *theirs) in zip(rows, _COLLECTIVES.get(name, []), strict=True):
        assert [1e3 * x for x in ours] == pytest.approx(theirs, rel=0.02)
    job = tmp_path / "job.toml"
    dp = _RANKS.get(name[:3], 1)
    job.write_text(
        f'kind = "job"\n[layout]\ndp = {dp}\n[schedule]\nkind = "traced"\nnum_microbatches = 1\n'
    )
    diagnosed = _run(["diagnose", job, "--trace", path], capsys)
    assert diagnosed["measured"] == pytest.approx(found["step_time_s"], rel=1e-3)
    if name == "t09_graph.json":
        assert any("one graph holds the whole step, so its" in x for x in found["does_not_tell"])
        assert "one graph holds the whole step, so its phases" in refused(
            ["fit", str(path), "--job", str(job), "--out", str(tmp_path / "out")]
        )
        return
    fitted = _run(["fit", path, "--job", job, "--out", tmp_path / "out"], capsys)
    assert fitted["num_steps"] == found["steps"]
    assert fitted["mean_step_time_s"] == pytest.approx(found["step_time_s"], rel=1e-3)
    if name == "t03_all_to_all.json":
        assert diagnosed["causes"][0]["name"] == "no-overlap"


def test_collectives_have_sizes_where_the_host_says_them(shared, capsys):
    found = _run(["trace", shared / "cases/traces/t03_all_to_all.json"], capsys)
    first, other = found["collectives"]
    keys = ("group", "ranks", "size", "calls", "bytes")
    assert [first[key] for key in keys] == ["3", 4, 500_000, 1, 1_000_000]
    assert [other[key] for key in keys] == [None, None, None, 1, None]


def test_causes_of_idle_time_are_apart(shared, capsys):
    found = _run(["trace", shared / "cases/traces/t10_blocked_host.json"], capsys)
    causes = {row["cause"]: 1e3 * row["seconds"] for row in found["idle"]}
    assert causes == pytest.approx({"input": 3.0, "cudaFree": 2.0, "launches": 1.14}, rel=0.02)


def test_a_device_that_is_far_behind_its_host_bounds_the_step(shared, capsys):
    found = _run(["trace", shared / "cases/traces/t02_host_ahead.json"], capsys)
    assert [row["cause"] for row in found["idle"]] == ["device"]


def test_the_processes_of_a_report_are_compared(shared, capsys):
    found = _run(["trace", shared / "cases/traces/t11_two_processes.sqlite"], capsys)
    first, slow = (row["phases"]["backward"] for row in found["by_rank"])
    assert slow - first == pytest.approx(0.4e-3, rel=0.02)
    (talk,) = found["by_rank"][1]["collectives"]
    assert talk["exposed_s"] == pytest.approx(1.1e-3, rel=0.02)


@pytest.mark.parametrize("format", [[], ["--format", "chakra"]])
def test_older_chakra_is_refused_by_its_name(format, shared, refused):
    path = shared / "cases/traces/t12_older_chakra.json"
    error = refused(["trace", str(path), *format])
    assert "the older JSON of Chakra, whose nodes have no starts" in error
    assert "3.0 ms of compute and 2.5 ms of communication" in error


def test_a_profile_of_a_whole_model_takes_as_long_as_without_a_profiler(shared, capsys):
    """Two steps of the first row of `step_times.csv`, 0.200 s; the profiler adds 4 %."""
    path = shared / "data/plain_h200/kineto_llama-3.2-1b.json.gz"
    found = _run(["trace", path], capsys)
    assert found["training"] is True
    assert found["step_time_s"] == pytest.approx(0.208, rel=0.005)
    computed = sum(found["phases"].values()) - found["phases"]["copies"]
    assert computed == pytest.approx(found["split"]["compute_s"], rel=0.01)


def test_the_parts_of_a_prediction_stand_beside_their_kernels(capsys):
    """Each second of either is in one part."""
    words = ["trace", _ROOT / "examples/gpu_profile.json.gz", "--job", _ROOT / "examples/job.toml"]
    found = _run(words, capsys)
    predicted, measured = (
        [row[key] for row in found["beside"] if row[key] is not None]
        for key in ("predicted_s", "measured_s")
    )
    mean = predict(prism.load_job(_ROOT / "examples/job.toml")).mean
    assert sum(predicted) == pytest.approx(mean, rel=1e-9)
    split = found["split"]
    seconds = sum(found["kinds"].values()) + split["exposed_s"] + split["idle_s"]
    assert sum(measured) == pytest.approx(seconds, rel=1e-9)
    (optimizer,) = [row for row in found["beside"] if row["part"] == "optimizer"]
    assert optimizer["measured_s"] == pytest.approx(found["phases"]["optimizer"])


def _made(lasts, kernel="gemm", marks="ProfilerStep#{}"):
    """A rank whose steps take so many milliseconds, in ten kernels after one another."""
    spans, at = SpanList(), 0
    for step, last in enumerate(lasts):
        length = round(1e6 * last)
        spans.add(Kind.RANGE, at, at + length, marks.format(step), "host")
        for i in range(10 if last > 1 else 0):
            begin = at + i * length // 10
            spans.add(Kind.LAUNCH, begin, begin + 1, "cudaLaunchKernel", "host", 10 * step + i)
            end = at + (i + 1) * length // 10
            spans.add(Kind.KERNEL, begin + 2, end, kernel, "7", 10 * step + i)
        at += length
    return RankTrace(spans.spans(), {}, 0, 0)


@pytest.mark.parametrize("marks", ["ProfilerStep#{}", "train_step #{}", "iteration {}", "Step: {}"])
def test_a_warm_up_and_an_empty_last_mark_are_no_steps(marks):
    found = contents([_made([30, 10, 10, 10, 10, 10, 0.1], marks=marks)])
    assert found.step_times_s == pytest.approx([10e-3] * 5, rel=1e-5)
    assert any("1 step before these had a warm-up" in sentence for sentence in found.tells)
    (gemm,) = found.kernels  # Those of steps, so that each step has as many.
    assert (gemm.calls, gemm.total_s) == (50, pytest.approx(50e-3, rel=1e-4))


@pytest.mark.parametrize("marks", ["forward_step {}", "microbatch 3 of step {}", "layer {}"])
def test_without_steps_the_whole_recording_counts(marks):
    found = contents([_made([10, 10], marks=marks)])
    assert (found.steps, found.step_time_s) == (0, 0)
    assert found.split.compute_s == pytest.approx(20e-3, rel=1e-3)
    assert any("the whole recording counts" in sentence for sentence in found.does_not_tell)


def test_a_profile_without_steps_is_beside_no_predicted_step(tmp_path, answered):
    rank = _made([10, 10], marks="layer {}")
    found, job = contents([rank]), prism.load_job(_ROOT / "examples/job.toml")
    for use in (lambda: measured_beside(job, found), lambda: median_steps([rank])):
        with pytest.raises(ValueError, match="The profile has no whole step; record one"):
            use()
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "pid": 1, "ts": 1, "dur": 5}
    (tmp_path / "a.json").write_text(json.dumps([kernel]))
    assert "1 of 1 rank, no whole step\n\nWhere the time goes\nof the recording" in (
        answered(["trace", str(tmp_path / "a.json")])
    )


def test_the_rank_of_the_table_is_told(shared, answered):
    path = shared / "cases/traces/t11_two_processes.sqlite"
    assert "Where the time goes on rank 0, of the median step time\n" in answered(
        ["trace", str(path)]
    )


def test_only_a_number_that_tells_ranks_apart_is_a_rank(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "pid": 1, "ts": 1, "dur": 5}
    for name in ("step.100.json", "step.101.json", "rank3.json"):
        (tmp_path / name).write_text(json.dumps([kernel]))
    ranks = [
        [r.rank for r in read_rank_traces(tmp_path / n)] for n in ("step.100.json", "rank3.json")
    ]
    assert ranks == [[0], [3]]
    assert [rank.rank for rank in read_rank_traces(tmp_path)] == [3, 100, 101]


@pytest.mark.parametrize("command", ["timeline", "report", "calibrate"])
def test_names_of_ranges_are_those_of_a_trace(command, tmp_path, refused):
    suffix = {"timeline": "json", "report": "html", "calibrate": "toml"}[command]
    words = [command, "megatron-22b-a100-8", "--names", "x.toml"]
    words += ["--to", "b.csv"] if command == "calibrate" else []
    assert re.search(
        "give a --trace, too|with --trace alone",
        refused([*words, "--out", str(tmp_path / f"a.{suffix}")]),
    )


def test_a_device_without_gaps_is_idle_for_no_time():
    spans = SpanList()
    for i in range(300):
        at = 100_003 * i
        spans.add(Kind.LAUNCH, at, at + 1, "cudaLaunchKernel", "host", i)
        spans.add(Kind.KERNEL, at + 2, at + 100_005, "gemm", "7", i)
    for step in range(10):
        at = 30 * 100_003 * step
        spans.add(Kind.RANGE, at, at + 30 * 100_003, f"ProfilerStep#{step}", "host")
    found = contents([RankTrace(spans.spans(), {}, 0, 0)])
    assert (found.steps, found.split.idle_s, found.idle, found.kernels[0].cv) == (10, 0, (), 0)


def test_names_of_kernels_that_communicate_may_be_given():
    names = RangeNames(kernels=(KernelRule("my_exchange", "all_to_all"),))
    found = contents([_made([10] * 4, "void my_exchange<8>(int*)")], names)
    (row,) = found.collectives
    assert (row.kind, row.calls) == ("all_to_all", 10)
    assert row.seconds == row.exposed_s == pytest.approx(10e-3, rel=1e-3)


def test_what_a_loop_of_xla_runs_counts_once():
    lines = {None: "/device:TPU:0", 1: "XLA Modules", 2: "XLA Ops"}
    events = [
        {"ph": "M", "pid": 1, "name": "thread_name" if tid else "process_name", "tid": tid}
        | {"args": {"name": name}}
        for tid, name in lines.items()
    ]
    parts = [(1, "jit_step", 0, 90), (2, "while.1", 10, 80), (2, "fusion.1", 10, 50)]
    for step in range(4):
        for tid, name, start, end in [*parts, (2, "all-reduce.2", 50, 80)]:
            times = {"ts": 100 * step + start, "dur": end - start}
            path = {"tf_op": "transpose(jvp(A))"} if name.startswith("fusion") else {}
            events.append({"ph": "X", "pid": 1, "tid": tid, "name": name, "args": path} | times)
    (spans,) = _devices(events)
    found = contents([RankTrace(spans, {}, 0, 0)])
    assert found.phases["backward"] == pytest.approx(40e-6)
    assert [(row.kind, row.seconds) for row in found.collectives] == [("all_reduce", 30e-6)]


def _lines(name, lines):
    """The spans of a device, of its lines of events of so many microseconds."""
    events = XlaEvents()
    events.name_line(0, None, name)
    for i, (line, parts) in enumerate(lines.items()):
        events.name_line(0, i, line)
        for part, start, end in parts:
            events.add(0, i, part, 1000 * start, 1000 * end, "")
    return events.devices()


def test_a_module_that_waits_for_its_copies_is_a_step_of_copies():
    """An operation that takes no time at the start of a wait does not contain it."""
    lines = {"XLA Modules": [], "XLA Ops": [], "Async XLA Ops": []}
    for at in range(0, 400, 100):
        lines["XLA Modules"].append(("jit_f", at, at + 100))
        waits = [("fusion.1", 0, 20), ("fusion.2", 20, 20), ("copy-done.1", 20, 100)]
        lines["XLA Ops"] += [(name, at + start, at + end) for name, start, end in waits]
        lines["Async XLA Ops"].append(("async-copy", at, at + 100))
    (spans,) = _lines("/device:TPU:0", lines)
    found = contents([RankTrace(spans, {}, 0, 0)])
    assert found.step_times_s == pytest.approx([100e-6] * 4)
    assert found.split.compute_s == pytest.approx(20e-6)
    assert (found.copies_s, found.split.idle_s) == pytest.approx((80e-6, 0))


def test_the_steps_of_a_device_without_modules_are_those_of_tensorflow():
    """Nothing tells why it is idle; a device that only copies is none."""
    lines = {"Stream #1(Compute)": [], "Steps": []}
    for i, at in enumerate(range(0, 400, 100)):
        lines["Steps"].append((str(i), at, at + 90))
        lines["Stream #1(Compute)"] += [("MemcpyH2D", at, at + 10), ("gemm", at + 20, at + 100)]
    (spans,) = _lines("/device:GPU:4", lines)
    found = contents([RankTrace(spans, {}, 0, 0)])
    assert found.step_times_s == pytest.approx([100e-6] * 4)
    assert [(one.cause, one.seconds) for one in found.idle] == [("unknown", pytest.approx(10e-6))]
    assert not _lines("/device:GPU:1", {"Stream #1": [("MemcpyH2D", 0, 9)]})


def _devices(events):
    found = XlaEvents()
    for e in events:
        if e["ph"] == "M":
            found.name_line(e["pid"], e["tid"], e["args"]["name"])
        else:
            times = (round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"])))
            found.add(e["pid"], e["tid"], e["name"], *times, e["args"].get("tf_op", ""))
    return found.devices()


def _xspace(events):
    """The events of JAX's `trace.json.gz` as its `xplane.pb` has them."""
    classes = message_classes(_SCHEMA)
    space, lines, names = classes["Space"](), {}, {}
    plane = space.planes.add(name="/device:GPU:0")
    plane.stats.add(key=1).value.name = "tf_op"
    titles = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    for e in events:
        if e["ph"] != "X" or not titles[e["pid"], None].startswith("/device"):
            continue
        title = titles[e["pid"], e["tid"]]
        if title not in lines:
            lines[title] = plane.lines.add(name=title, timestamp_ns=10**18)
        if e["name"] not in names:
            entry = plane.events.add(key=len(names) + 1)
            names[e["name"]] = entry.key
            entry.value.name = e["name"]
        ps = {"offset_ps": round(1e6 * e["ts"]), "duration_ps": round(1e6 * e["dur"])}
        event = lines[title].events.add(metadata_id=names[e["name"]], **ps)
        if path := e["args"].get("tf_op"):
            event.stats.add(metadata_id=1, str_val=path)
    return space.SerializeToString()


def test_a_protocol_buffer_of_xla_tells_the_same_as_its_json(shared, tmp_path):
    path = shared / "cases/traces/t07_xla.json"
    (tmp_path / "host.xplane.pb").write_bytes(_xspace(json.loads(path.read_text())["traceEvents"]))
    one, other = (
        contents(read_rank_traces(path)),
        contents(read_rank_traces(tmp_path / "host.xplane.pb")),
    )
    for name in ("training", "step_times_s", "split", "phases", "collectives", "idle"):
        assert getattr(one, name) == getattr(other, name)


def test_the_file_of_one_rank_of_many_is_fitted_alone(shared, tmp_path, capsys):
    path = tmp_path / "rank3.json"
    path.write_bytes((shared / "cases/traces/t05_two_optimizers.json").read_bytes())
    (tmp_path / "job.toml").write_text(
        'kind = "job"\n[layout]\n[schedule]\nkind = "1f1b"\nnum_microbatches = 1\n'
    )
    words = ["fit", path, "--job", tmp_path / "job.toml", "--out", tmp_path / "out"]
    found = _run(words, capsys)
    assert found["num_steps"] == 5
    assert "rank 3 is fitted as the only one of the layout" in found["notes"]


def test_what_is_beside_a_graph_of_a_whole_step_tells_no_phases():
    """An optimizer that is launched by itself, after a graph of forward and backward."""
    trace = _made([10] * 4)
    spans = SpanList()
    for kind, start, end, name, lane, link in zip(
        *(
            getattr(trace.spans, x).tolist()
            for x in ("kind", "start", "end", "name", "lane", "link")
        ),
        strict=True,
    ):
        text = trace.spans.names[name]
        optimizer = link % 10 == 9
        if kind == Kind.LAUNCH and optimizer:
            spans.add(Kind.RANGE, start - 1, end + 1, "Optimizer.step#A.step", "host")
        text = "cudaGraphLaunch" if kind == Kind.LAUNCH and not optimizer else text
        spans.add(kind, start, end, text, str(lane), link)
    found = contents([RankTrace(spans.spans(), {}, 0, 0)])
    assert found.training is True
    assert found.phases is None
    assert any("one graph holds the whole step" in sentence for sentence in found.does_not_tell)


def test_the_launches_of_another_thread_than_the_optimizers_are_a_backward():
    """In files whose nodes of autograd have no ranges."""
    spans = SpanList()
    for i in range(40):
        at, kind = 1000 * i, i % 10
        lane = "engine" if 3 <= kind < 9 else "main"
        if kind == 9:
            spans.add(Kind.RANGE, at, at + 9, "Optimizer.step#A.step", "main")
        spans.add(Kind.LAUNCH, at + 1, at + 2, "cudaLaunchKernel", lane, i)
        spans.add(Kind.KERNEL, at + 10, at + 1000, "gemm", "7", i)
    found = contents([RankTrace(spans.spans(), {}, 0, 0)])
    assert found.phases == pytest.approx(
        {"forward": 2.97e-6, "backward": 5.94e-6, "optimizer": 0.99e-6, "copies": 0}
    )
    assert found.step_times_s == pytest.approx([10e-6] * 4, rel=0.01)


@pytest.mark.parametrize("ends", ["sf", "fs"])
@pytest.mark.parametrize(("arrows", "microbatches"), [(True, 2), (False, 1)])
def test_arrows_of_autograd_tell_apart_microbatches_that_follow_one_another(
    tmp_path, ends, arrows, microbatches
):
    """Two forwards of three kernels, then their backwards, whose nodes are in the reverse order."""
    events = []

    def add(cat, name, thread, start, last, **args):
        event = {"ph": "X", "cat": cat, "name": name, "tid": thread, "pid": 1}
        events.append(event | {"ts": start, "dur": last, "args": args})

    for step in range(4):
        nodes = []  # When the operator and the node of each kernel start.
        for i in range(12):
            at, backward = 1000 * step + 50 * i, i >= 6
            thread = 2 if backward else 1
            if backward:
                add("cpu_op", f"autograd::engine::evaluate_function: {i}", thread, at, 40)
                forward = 3 * (i // 3 - 2) + 2 - i % 3
                nodes.append((1000 * step + 50 * forward, at))
            add("cuda_runtime", "cudaLaunchKernel", thread, at + 5, 5, correlation=12 * step + i)
            add("kernel", f"gemm{i}", 7, at + 10, 38, correlation=12 * step + i)
        add("user_annotation", "Optimizer.step#A.step", 1, 1000 * step + 700, 50)
        for i, pair in enumerate(nodes if arrows else []):
            both = dict(zip("sf", pair, strict=True))
            for end in ends:
                own = {"cat": "fwdbwd", "name": "fwdbwd", "id": 100 * step + i, "pid": 1}
                events.append(own | {"ph": end, "ts": both[end], "tid": 1 + (end == "f")})
    (tmp_path / "a.json").write_text(json.dumps(events))
    (rank,) = read_rank_traces(tmp_path / "a.json")
    ops = rank_ops(rank, RangeNames())
    told = contents([rank])
    assert told.microbatches == microbatches
    assert arrows != any("follow one another" in sentence for sentence in told.does_not_tell)
    job = Job(Layout(), ScheduleConfig(kind="traced", num_microbatches=2), name="a")
    if not arrows:
        with pytest.raises(ValueError, match=r"num_microbatches = 2; neither ranges nor autograd"):
            read_profile_traces(tmp_path / "a.json", job)
    found = [(op.op, op.microbatch, op.end - op.start) for op in ops.ops if op.step == 1]
    last = 1000 * (300 // microbatches - 12)
    assert found[:-1] == [
        *(("forward-compute", i, last) for i in range(microbatches)),
        *(("backward-compute", i, last) for i in range(microbatches)),
    ]


def test_optimizers_bound_steps_whose_rest_is_a_graph():
    """Without marks, and without names of what the graph runs; also if two follow one another."""
    spans = SpanList()
    for step in range(5):
        at = 1000 * step
        spans.add(Kind.LAUNCH, at, at + 1, "cudaGraphLaunch", "main", 10 * step)
        for i in range(8):
            spans.add(Kind.KERNEL, at + 100 * i + 2, at + 100 * i + 100, "gemm", "7", 10 * step)
        for i in (8, 9):
            begin, link = at + 100 * i, 10 * step + i
            spans.add(Kind.RANGE, begin, begin + 9, f"Optimizer.step#{i}.step", "main")
            spans.add(Kind.LAUNCH, begin + 1, begin + 2, "cudaLaunchKernel", "main", link)
            spans.add(Kind.KERNEL, begin + 2, begin + 100, "adam", "7", link)
    found = contents([RankTrace(spans.spans(), {}, 0, 0)])
    assert found.training is True
    assert found.step_times_s == pytest.approx([1e-6] * 5, rel=0.01)


def test_shapes_of_the_hosts_ranges_tell_sizes_in_files_of_2023(tmp_path):
    """Of two tensors that are reduced together, and of one of whole numbers of eight bytes."""
    events = []
    ranges = [
        ("all_reduce", [[3, 5], [10]], ["float", "float"]),
        ("all_to_all", [[24]], ["long int"]),
    ]
    for i, (kind, shapes, types) in enumerate(ranges):
        at = 100 * i
        own = {"Input Dims": shapes, "Input type": types}
        name = ("ncclKernel_AllReduce_RING_LL_Sum_float", "ncclKernel_SendRecv_RING_SIMPLE")[i]
        for cat, text, start, args in (
            ("user_annotation", f"nccl:{kind}", at, own),
            ("cuda_runtime", "cudaLaunchKernel", at + 20, {"correlation": i}),
            ("kernel", name, at + 30, {"correlation": i}),
        ):
            event = {"ph": "X", "cat": cat, "name": text, "tid": 1, "pid": 1, "dur": 10}
            events.append(event | {"ts": start, "args": args})
    (tmp_path / "a.json").write_text(json.dumps(events))
    rows = contents(read_rank_traces(tmp_path / "a.json")).collectives
    assert {(row.kind, row.size, row.bytes) for row in rows} == {
        ("all_reduce", 25, 100),
        ("all_to_all", 24, 192),
    }
