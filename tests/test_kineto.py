import gzip
import itertools as it
import json
from typing import Any

import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.trace import LETTERS, _json_array, contents, read_profile_traces, read_rank_traces
from prism_jax.trace._json_array import read_array
from prism_jax.trace._spans import Kind, RankTrace, SpanList
from prism_jax.trace._trace import RangeNames, RangeRule

from .test_trace import _job, _made_trace, _plain, _stages


_LETTER = dict(LETTERS) | {
    f"{p}-{w}": f"{w.upper()}_{p[0].upper()}"
    for p in ("forward", "backward")
    for w in ("send", "recv")
}
_COLLECTIVES = {"params-all-gather": "AllGather", "grads-reduce-scatter": "ReduceScatter"}


def _events(trace, d, s, *, graph=False, unit=1e6):
    """What Kineto would have recorded of one worker: ranges and launches on the host a little
    before the kernels that they start."""
    events, number, sequence = [], 0, {}
    stages, microbatches = _stages(trace.job)[s], trace.job.schedule.num_microbatches

    def add(cat, name, start, end, lane, **args):
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0 if cat == "kernel" else 77,
                "tid": lane,
                "ts": unit * start,
                "dur": unit * (end - start),
                "args": args,
            }
        )

    for t, step in enumerate(trace.steps.tolist()):
        origin = 100.0 + 50.0 * t
        lasts = [
            np.nanmax(trace.end[op][t, d, s]) for op in (*LETTERS, "optimizer") if op in trace.end
        ]
        add("user_annotation", f"ProfilerStep#{step}", origin - 1e-4, origin + max(lasts), 77)
        loss = {"Collective name": "allreduce", "Process Group Name": "all", "Seq": step}
        add("kernel", "ncclDevKernel_AllReduce", origin + 29, origin + 30, 21, **loss)
        for op, start in trace.start.items():
            for m in np.flatnonzero(~np.isnan(start[t, d, s])).tolist():
                a, b = origin + start[t, d, s, m], origin + trace.end[op][t, d, s, m]
                if op in _LETTER:
                    name = f"PP:{stages[m // microbatches]}{_LETTER[op]}{m % microbatches}"
                elif op == "optimizer":
                    name = "Optimizer.step#Adam.step"
                else:
                    name = op
                number += 1
                called = a - 4e-6 * (list(trace.start).index(op) + 1)
                add("user_annotation", name, called, called + 3e-6, 77)
                call = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
                add("cuda_runtime", call, called + 1e-6, called + 2e-6, 77, correlation=number)
                if op in _COLLECTIVES:
                    sequence[op] = sequence.get(op, 0) + 1
                    names = {"Collective name": _COLLECTIVES[op].lower(), "Seq": sequence[op]}
                    group = {"Process Group Name": str(s), "Group size": 2, "In msg nelems": 8}
                    kernel = f"ncclDevKernel_{_COLLECTIVES[op]}_RING"
                    add("kernel", kernel, a, b, 20, correlation=number, **names, **group)
                    continue
                if op not in LETTERS and op != "optimizer":
                    add("kernel", "ncclDevKernel_SendRecv", a, b, 21, correlation=number)
                    continue
                cuts = [a, a + 0.4 * (b - a), b] if graph else [a, b]
                for low, high in it.pairwise(cuts):
                    add("kernel", "gemm", low, high, 7, correlation=number, grid=[1, 2, 3])
    return events


def _write(folder, trace, *, skew=0.0, only=None, **options):
    pp = trace.job.layout.pp
    folder.mkdir()
    for rank in range(trace.job.layout.dp * pp) if only is None else only:
        events = _events(trace, rank % 2, rank // 2, **options)
        for event in events:
            event["ts"] += 1e6 * skew * rank
        own = {"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": events}
        text = json.dumps({"schemaVersion": 1, **own, "baseTimeNanoseconds": 10**18})
        path = folder / f"rank{rank}.json"
        if rank % 2:
            path = path.with_suffix(".json.gz")
        path.write_bytes(gzip.compress(text.encode()) if rank % 2 else text.encode())
    return folder


@pytest.fixture(scope="module")
def made():
    return _made_trace(_job(), 12, _plain)


@pytest.mark.parametrize("graph", [False, True])
def test_ops_are_found_on_clocks_that_are_apart(tmp_path, made, graph):
    """By 1.5 ms a rank; with CUDA graphs, of which all kernels have one launch."""
    trace = read_profile_traces(_write(tmp_path / "k", made, skew=1.5e-3, graph=graph), made.job)
    assert trace.steps.tolist() == made.steps.tolist()
    assert not trace.dropped
    assert not trace.notes
    assert {*trace.end} == {*made.end, "load-data"}
    # Each step began 0.1 ms before its first op.
    for op, end in made.end.items():
        np.testing.assert_allclose(trace.end[op] - 1e-4, end, atol=2e-8)
    starts = trace.start["forward-compute"] - 1e-4
    np.testing.assert_allclose(starts, made.start["forward-compute"], atol=2e-8)


def test_the_op_table_of_a_trace_is_the_same_trace(tmp_path, made, answered):
    folder, job = _write(tmp_path / "k", made), tmp_path / "job.toml"
    job.write_text(
        'kind = "job"\n[layout]\ndp = 2\npp = 2\n[schedule]\nkind = "1f1b"\nnum_microbatches = 4\n'
    )
    table = tmp_path / "ops.parquet"
    words = ["trace", str(folder), "--job", str(job), "--ops", str(table), "--json"]
    found = answered(words)
    assert found["ranks"] == [0, 1, 2, 3]
    assert found["steps"] == 12
    assert found["microbatches"] == 4
    assert found["clocks"]["matched"] == 12 * 3
    one, other = read_profile_traces(folder, made.job), prism.read_trace(table, made.job)
    assert {*one.start} == {*other.start}
    for op in one.start:
        np.testing.assert_array_equal(one.start[op], other.start[op])
        np.testing.assert_array_equal(one.end[op], other.end[op])


def test_a_profile_has_the_notes_of_its_table_of_ops_too(tmp_path, made):
    folder = _write(tmp_path / "k", made, only=[0, 1, 2])
    unit, missing = read_profile_traces(folder, made.job, time_unit="s").notes
    assert unit.startswith("a step takes")
    assert missing.startswith("1 worker of 4 has no trace")


def test_a_replica_with_a_missing_rank_is_left_out(tmp_path, made):
    folder = _write(tmp_path / "k", made, only=[0, 1, 2])
    trace = read_profile_traces(folder, made.job)
    assert trace.job.layout.dp == 1
    assert "replica 1, stage 1, rank 3: only 1 of 2 replicas are fitted" in trace.notes[0]
    assert trace.notes[0].startswith("1 worker of 4 has no trace")
    np.testing.assert_allclose(
        trace.end["forward-compute"][:, 0] - 1e-4, made.end["forward-compute"][:, 0], atol=2e-8
    )
    (folder / "rank2.json").unlink()
    with pytest.raises(
        ValueError,
        match="workers of 4 have no trace, and no replica is whole; "
        "the first is replica 0, stage 1, rank 2",
    ):
        read_profile_traces(folder, made.job)


def test_a_truncated_file_is_read_as_far_as_it_goes(tmp_path, made):
    folder = _write(tmp_path / "k", made)
    for path in folder.iterdir():  # Plain and compressed.
        path.write_bytes(path.read_bytes()[: 2 * path.stat().st_size // 3])
    trace = read_profile_traces(folder, made.job)
    assert 4 <= len(trace.steps) < 12
    assert trace.steps.tolist() == list(range(len(trace.steps)))
    assert [note for note in trace.notes if note.startswith("rank 0: the file ends early")]
    number = len(trace.steps)
    np.testing.assert_allclose(
        trace.end["optimizer"] - 1e-4, made.end["optimizer"][:number], atol=2e-8
    )


def test_files_cut_in_the_first_step_are_said_to_end_early(tmp_path, made):
    folder = _write(tmp_path / "k", made)
    kept = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    def refused(*shares):
        for (path, data), share in zip(kept.items(), shares, strict=True):
            path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(ValueError, match="; the file") as error:
            read_profile_traces(folder, made.job)
        return str(error.value)

    one = refused(1, 0.07, *[1] * (len(kept) - 2))
    assert "ops are missing in each of" in one
    assert one.endswith("; the file of rank 1 ends early, so copy or record it again.")
    assert "the files of 2 ranks end early, the first rank 0" in refused(
        0.07, 0.07, *[1] * (len(kept) - 2)
    )
    none = refused(0.0035, *[1] * (len(kept) - 1))
    assert (
        "no op of them is known by its range or its launch; the file of rank 0 ends early" in none
    )


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
@pytest.mark.parametrize("given", [False, True])
def test_other_units_of_time(tmp_path, made, unit, given):
    """Calls of a microsecond say which it is."""
    per_second = {"s": 1.0, "ms": 1e3, "ns": 1e9}[unit]
    folder = _write(tmp_path / "k", made, only=[0], unit=per_second)
    (trace,) = read_rank_traces(folder, time_unit=unit if given else None)
    again = contents([trace])
    steps = [made.end[op][:, 0, 0].max(axis=1) for op in (*LETTERS, "optimizer") if op in made.end]
    expected = np.median(1e-4 + np.max(steps, axis=0))
    assert again.step_time_s == pytest.approx(expected, rel=1e-9)
    assert bool(trace.notes) is not given


def _one(name: str, after: bytes = b"") -> bytes:
    """A trace of one range."""
    event = {"ph": "X", "ts": 1, "dur": 1, "cat": "user_annotation", "name": name}
    return b'{"traceEvents": [%s]%s}' % (json.dumps(event).encode(), after)


def test_no_name_of_a_trace_controls_a_terminal(tmp_path, capsys):
    """Erased lines, a bell, C1, line breaks and turned text, in names of kernels and categories."""
    evil = "sgemm\x1b[2K\x07\x9b1A\n\r\u2028\u202egnp.exe\u2066"
    events = [
        {"ph": "X", "ts": 1, "dur": 9, "cat": cat, "name": name}
        for cat, name in (("user_annotation", "ProfilerStep#1"), ("kernel", evil), (evil, evil))
    ]
    path = tmp_path / f"{evil}rank0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main(["trace", str(path)]) == 0
    said = capsys.readouterr()
    for line in (said.out + said.err).split("\n"):
        assert all(c.isprintable() for c in line), ascii(line)
    assert "sgemm\\x1b[2K" in said.out


def test_a_long_text_that_looks_like_many_events_is_one(tmp_path):
    """It took time that grew with the square of its length."""
    text = {"ph": "X", "cat": "other", "name": 600_000 * "}, {"}
    events = [{"ph": "X", "ts": 1, "dur": 1, "cat": "user_annotation", "name": "a"}, text, text]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    (trace,) = read_rank_traces(tmp_path)
    assert trace.events == {"user_annotation": 1, "other": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\x00\x01", "not a JSON trace"),
        (b'{"a": 1}', "not a JSON trace"),
        (b'{"traceEvents": []}', "it has no events"),
        (b'{"traceEvents": [1]}', "event 0 is not part of a trace"),
        (b'{"traceEvents": [{"ts": "x"}]}', "`ts` of event 0"),
        (b'{"traceEvents": [{"ts": 1}{"ts": 2}]}', "not valid JSON at byte 26"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e300, "dur": 1, "cat": "kernel"}]}', "any clock"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": -2, "cat": "kernel"}]}', "lasts -2, and"),
        (_one("a", b', "baseTimeNanoseconds": 1' + 30 * b"0"), "beyond any clock"),
        (_one("a", b', "baseTimeNanoseconds": 9223372036854775807'), "beyond any clock"),
        (_one("a", b', "distributedInfo": {"world_size": 100000000}'), "`world_size` is 1000000"),
        (_one("ProfilerStep#" + 22 * "1"), "has the number 1111111111111111111111,"),
        (_one("PP:0F999999999"), "has the number 999999999,"),
        (b'{"traceEvents": [{"a": ' + 100_000 * b"[", "nests too deeply"),  # For any Python.
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, refused, content, message):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    error = refused(["trace", str(path)])
    assert message in error
    assert error.count("\n") == 1


def test_bad_folders_and_names_are_refused(tmp_path, refused):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('[{"ph": "X"}]')
    assert "name it `rank<number>.json`" in refused(["trace", str(tmp_path)])
    (tmp_path / "b.json").rename(tmp_path / "rank0.json")
    (tmp_path / "a.json").rename(tmp_path / "rank00.json")
    assert "of rank 0, and so is" in refused(["trace", str(tmp_path)])
    names = tmp_path / "names.toml"
    for text, message in (
        ('kind = "ranges"\n[[ops]]\nrange = "("\nop = "optimizer"', "not a regular expression"),
        ('kind = "ranges"\n[[ops]]\nrange = "a"\nop = "optimiser"', "did you mean"),
        ('kind = "ranges"\nstep = "a"', "has the groups none"),
        ('kind = "ranges"\norder = ["tp"]', "`order` is"),
    ):
        names.write_text(text)
        assert message in refused(["trace", str(tmp_path / "rank0.json"), "--names", str(names)])


def test_names_of_ranges_may_be_given(tmp_path):
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 10}
        for name, ts in (("it 3", 0), ("fw 1 of 2", 1), ("it 4", 10), ("fw 0 of 2", 11))
    ]
    (tmp_path / "rank0.json").write_text(json.dumps(events))
    rule = RangeRule(r"fw (?P<microbatch>\d+) of \d+", "forward-compute")
    found = contents(read_rank_traces(tmp_path), RangeNames((rule,), r"it (?P<step>\d+)"))
    assert found.ops == {"forward-compute": 2, "load-data": 2}
    assert found.steps == 2
    assert found.microbatches == 2


def test_an_inference_trace_lists_its_limits(shared, answered):
    path = shared / "data/kineto/h100_inference.json.gz"
    found = answered(["trace", str(path), "--json"])
    assert found["events"]["kernel"] == 1465
    assert any("inference" in sentence for sentence in found["does_not_tell"])
    assert any("one rank" in sentence for sentence in found["does_not_tell"])
    assert found["training"] is False
    assert sum(found["kinds"].values()) == pytest.approx(found["phases"]["forward"], rel=1e-3)
    # All that the step computes is a forward; the step begins when the device has ended its queue.
    assert found["phases"]["forward"] == pytest.approx(found["split"]["compute_s"], rel=1e-3)
    assert found["step_time_s"] == pytest.approx(34.892e-3, rel=0.02)  # The device's own mark.


def test_an_array_is_read_the_same_in_pieces_of_any_size(tmp_path, monkeypatch):
    """And cut at any byte, as far as it goes."""
    events = [
        {"name": "a},{b", "args": {"x": [{"y": 1}, {"z": 2}]}, "n": i + 0.25} for i in range(9)
    ]
    path = tmp_path / "a.json"
    monkeypatch.setattr(_json_array, "_CHUNK", 64)
    monkeypatch.setattr(_json_array, "_LAST", 50)
    for document in ({"h": 1, "traceEvents": events, "t": [{"a": 1}, {"b": 2}]}, events):
        text = json.dumps(document, indent=1).encode()
        for number in (*range(40, len(text), 7), len(text)):
            for content in (text[:number], gzip.compress(text[:number])):
                path.write_bytes(content)
                found = []
                with open(path, "rb") as file:
                    beside, _, cut = read_array(file, "traceEvents", dict[str, Any], found.extend)
                assert found == events[: len(found)]
                assert cut or len(found) == len(events)
        assert not cut
        assert beside == {"h": 1, "t": [{"a": 1}, {"b": 2}]} or document is events


def test_nan_and_infinity_in_json_are_none(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [{"a": nan, "b": 1}, {"a": -inf}, {"a": 2}], "t": NaN}')
    found = []
    with open(path, "rb") as file:
        read_array(file, "traceEvents", dict[str, Any], found.extend)
    assert found == [{"a": None, "b": 1}, {"a": None}, {"a": 2}]


def test_all_calls_of_a_kernel_count():
    """Also on a rank on which a hundred others take longer."""
    traces = []
    for rank, own in enumerate((1000, 1)):
        spans = SpanList()
        names = ("matmul", "matmul", *(f"kernel{i}" for i in range(150)))
        for name, end in zip(names, (own, own, *range(10, 160)), strict=True):
            spans.add(Kind.KERNEL, 0, end, name, "7")
        traces.append(RankTrace(spans.spans(), {}, 0, rank))
    pools = contents(traces).kernels
    assert len(pools) == 100
    assert (pools[0].name, pools[0].calls) == ("matmul", 4)
    assert pools[0].total_s == pytest.approx(2002e-9, rel=1e-12)
