"""A pipeline of four processes, recorded by `benchmarks/own_traces.py` (PyTorch 2.13, gloo, 1F1B,
sequences of uneven documents) without the arguments of its operators.
"""

import gzip
import json
import pathlib

import numpy as np
import pytest

from prism_jax.data import load_job
from prism_jax.profile import replayed_step_times, traced_graph
from prism_jax.trace import (
    contents,
    outline,
    read_profile_traces,
    read_range_names,
    read_rank_traces,
    read_step_times,
)


_FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "pytorch_profile"


@pytest.fixture(scope="module")
def trace():
    names = read_range_names(_FOLDER / "names.toml")
    return read_profile_traces(_FOLDER, load_job(_FOLDER / "job.toml"), names=names)


def test_steps_take_as_long_as_they_were_measured_to(trace):
    measured = read_step_times(_FOLDER / "step_times.csv")
    assert trace.steps.tolist() == list(range(4, 12))
    assert not trace.dropped
    assert not trace.notes
    np.testing.assert_allclose(trace.step_times(), measured, rtol=0.02)


def test_ops_start_where_the_schedule_says(trace):
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    np.testing.assert_allclose(again, trace.step_times(), rtol=0.005)
    assert [call.op for call in outline(trace).before] == ["load-data"]


def test_ops_never_wait_for_later_starts(trace):
    """A microbatch's forward on a stage ends before it starts on the next one, on one clock."""
    forward, backward = (trace.end[f"{p}-compute"] for p in ("forward", "backward"))
    assert np.all(trace.start["forward-compute"][:, :, 1:] >= forward[:, :, :-1])
    assert np.all(trace.start["backward-compute"][:, :, :-1] >= backward[:, :, 1:])


def test_contents_of_the_recorded_profile():
    found = contents(read_rank_traces(_FOLDER), read_range_names(_FOLDER / "names.toml"))
    assert found.ranks == (0, 1, 2, 3)
    assert not found.missing
    assert not found.on_device
    assert found.microbatches == 4
    assert found.ops["forward-compute"] == found.ops["backward-compute"] == 4 * 4 * 8
    assert found.clocks.matched >= 8  # The barriers between steps.


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory):
    """The same without the ranges that name ops of the pipeline. It was recorded without arrows of
    autograd: here the first operator of a forward has the last node of its backward, and the
    last operator has the first node.
    """
    folder = tmp_path_factory.mktemp("unnamed")
    for path in _FOLDER.glob("*.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))
        named, kept, forwards, arrows = [], [], {}, []
        for e in sorted(events["traceEvents"], key=lambda e: e["ts"]):
            (named if e["name"].startswith("PP:") else kept).append(e)
        for e in named:
            within = [o["ts"] for o in kept if e["ts"] <= o["ts"] < e["ts"] + e["dur"]]
            microbatch, ends = e["name"][5:], (within[0], within[-1])
            if e["name"][4] == "F":
                forwards[microbatch] = ends
                continue
            for start, end in zip(forwards[microbatch], reversed(ends), strict=True):
                own = {"cat": "fwdbwd", "name": "fwdbwd", "id": len(arrows), "pid": e["pid"]}
                arrows += [
                    own | {"ph": ph, "ts": ts, "tid": e["tid"]}
                    for ph, ts in (("s", start), ("f", end))
                ]
        kept += arrows
        (folder / path.stem).write_text(json.dumps(events | {"traceEvents": kept}))
    return folder


def test_microbatches_are_told_by_their_phases_where_no_range_names_them(trace, unnamed):
    names, job = read_range_names(_FOLDER / "names.toml"), load_job(_FOLDER / "job.toml")
    found = read_profile_traces(unnamed, job, names=names)
    assert found.steps.tolist() == trace.steps.tolist()
    step_time = trace.step_times().mean()
    for op in ("forward-compute", "backward-compute"):
        late, longer = (
            np.abs(x[op] - y[op]) / step_time
            for x, y in ((found.start, trace.start), (found.end, trace.end))
        )
        assert np.max(late) < 0.01
        # An operator between two microbatches is taken for the first one's.
        assert np.median(longer) < 0.003
        assert np.quantile(longer, 0.9) < 0.02
