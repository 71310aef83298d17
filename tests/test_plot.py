import dataclasses
import io
import itertools as it
import json
import pathlib
import sys

import jax
import matplotlib
import matplotlib.colors
import matplotlib.figure
import msgspec
import numpy as np
import polars as pl
import pytest

import prism_jax as prism
from prism_jax import plot
from prism_jax._estimate import Estimate
from prism_jax.analysis import Criticality, Part, Sensitivity
from prism_jax.engine import simulated_steps
from prism_jax.plot._chrome_trace import op_name
from prism_jax.plot._pipeline import critical_line
from prism_jax.prediction._memory import RankMemory
from prism_jax.runs import RunLaw
from prism_jax.trace import median_steps, read_rank_traces

from .helpers import event_loop_ends, made_law, refusal, rich_program


matplotlib.use("Agg")

_PROFILE = pathlib.Path(__file__).parents[1] / "examples" / "gpu_profile.json.gz"
_UNITS = [
    "(s)",
    "(ms)",
    "(µs)",
    "(%)",
    "(number)",
    "(GPUs)",
    "(GiB)",
    "probability",
    "days",
    "rank",
]
_LAW = made_law()
_MEASURED = np.sort(np.random.default_rng(1).gamma(4.0, 0.25, 80))


_PARTS = {"compute": 1.25, "bubble": 0.2, "exposed tp": 0.05, "variability": -0.02}


def _memory():
    parts = ("optimizer", "parameters", "gradients", "mlp", "attention", "logits", "libraries")
    sizes = [{name: (9 - i + rank) * 1e9 for i, name in enumerate(parts)} for rank in range(12)]
    ranks = (RankMemory(i, sum(one.values()), one) for i, one in enumerate(sizes))
    return prism.prediction.Memory(tuple(ranks), 80e9)


def _estimate(value):
    return Estimate(value, 0.1 * abs(value), 15.0)


def _sensitivity(unit="s", scale=1e-3):
    names = ("gemm", "rank", "all_gather", "GPUs of rank 11")
    parts = tuple(
        Part(
            "kernel",
            name,
            mean=_estimate(5 * scale * (i + 1)),
            spread=_estimate(3.6 * scale / (i + 1)),
            gain=None if i == 2 else _estimate(2.0 * scale / (i + 1)),
        )
        for i, name in enumerate(names)
    )
    one = _estimate(1.0)
    return Sensitivity("p95", unit, one, parts, one, one, {}, 1600)


def _criticality():
    rng = np.random.default_rng(2)
    stage, microbatch, phase = np.array([*it.product(range(3), range(4), range(3))]).T
    ops = {
        "phase": np.array(["F", "B", "SR"])[phase],
        "stage": stage,
        "microbatch": microbatch,
        "rank": stage,
        "probability": rng.random(len(stage)),
        "latency_s": 1 + rng.random(len(stage)),
    }
    return Criticality(ops, {}, {}, np.zeros(1), np.zeros(1), 1, 1.0)


def _run_law():
    days = np.sort(54 + np.random.default_rng(3).gamma(2.0, 0.5, 5000))
    return RunLaw(
        days,
        {"work": 50.0, "lost": 4.0},
        {"gpu": 100.0},
        600.0,
        700.0,
        {},
        len(days),
        len(days),
        0.0,
    )


def _rows():
    sizes = [1024, 64, 256, 512, 128]
    return [
        {
            "gpus": n,
            "layout": f"tp 8, pp {i + 1}, dp {n}",
            "mean_s": 1 + n / 1e4,
            "p95_s": 1.1 + n / 5e3,
            "p95_low_s": 1.08 + n / 5e3,
            "p95_high_s": 1.15 + n / 5e3,
        }
        for i, n in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def program():
    return rich_program(8)


@pytest.fixture(scope="module")
def step(program):
    return prism.sample_step(program, quantile=0.9, num_samples=512, key=jax.random.key(0))


def _pictures(step):
    return {
        "histogram": plot.histogram(_LAW, _MEASURED),
        "cdf": plot.cdf(_LAW, _MEASURED),
        "qq": plot.qq(_LAW, _MEASURED),
        "tornado": plot.tornado(_sensitivity()),
        "mean tornado": plot.tornado(_sensitivity(), of="mean"),
        "probabilities": plot.tornado(_sensitivity("1", 0.01)),
        "heat_map": plot.heat_map(_criticality()),
        "gantt": plot.gantt(step),
        "scale": plot.scale(_rows(), "gpus", label="size of the job (GPUs)"),
        "layouts": plot.layouts(pl.DataFrame(_rows()), mean="mean_s", p95="p95_s"),
        "training_run": plot.training_run(_run_law(), deadline_days=55.0),
        "breakdown": plot.breakdown(_PARTS),
        "memory": plot.memory(_memory()),
    }


def _boxes(axis):
    labels = [tick.label1 for tick in axis.get_major_ticks()]
    low, high = sorted(axis.get_view_interval())
    shown = [
        label
        for tick, label in zip(axis.get_major_ticks(), labels, strict=True)
        if low <= tick.get_loc() <= high and label.get_text()
    ]
    return [label.get_window_extent() for label in shown]


def test_axes_have_units_and_tick_labels_do_not_overlap(step):
    for name, ax in _pictures(step).items():
        ax.figure.draw_without_rendering()
        assert any(unit in ax.get_xlabel() for unit in _UNITS), name
        assert ax.get_ylabel(), name
        if name not in (
            "tornado",
            "mean tornado",
            "probabilities",
            "layouts",
            "breakdown",
        ):  # Names of parts.
            assert any(unit in ax.get_ylabel() for unit in _UNITS), name
        for axis in (ax.xaxis, ax.yaxis):
            boxes = _boxes(axis)
            assert len(boxes) >= 2, name
            assert not any(a.overlaps(b) for a, b in it.combinations(boxes, 2)), name
            assert all(ax.figure.bbox.padded(1).containsx(box.x0) for box in boxes), name


def _step_of(step, ranks):
    """The step with the ops of its first ranks alone."""
    mine = np.flatnonzero(step.ops["rank"] < ranks)
    ops = {name: values[mine] for name, values in step.ops.items()}
    receivers, path = np.full(len(mine), -1), np.arange(0)
    reduction = step.reduction_s[:ranks]
    changes = {"ops": ops, "receivers": receivers, "path": path, "reduction_s": reduction}
    return dataclasses.replace(step, **changes, last_rank=0)


def _extremes(step):
    """One of everything, many, and names as long as they may be."""
    name = "a" * 80
    many = [{"gpus": 64 * 2**i, "mean_s": 1 + i, "p95_s": 2 + i} for i in range(16)]
    near = [{"gpus": n, "mean_s": n, "p95_s": n} for n in (64, 640, 704, 720, 4096)]
    layouts = [{"layout": name, "mean [s]": 1.0, "p95 [s]": 1.0}]
    alone = {key: x[:1] for key, x in _criticality().ops.items()}
    one, whole = _sensitivity(), _memory()
    part = dataclasses.replace(one.parts[0], name=name)
    return {
        "tornado": plot.tornado(dataclasses.replace(one, parts=(part,))),
        "breakdown": plot.breakdown({name: 1e-5, "variability": -4e-6, "x": 0.0}),
        "layouts": plot.layouts(layouts),
        "scale": plot.scale(many, "gpus"),
        "near": plot.scale(near, "gpus"),
        "size": plot.scale(many[:1], "gpus"),
        "memory": plot.memory(prism.prediction.Memory(whole.ranks[:1], 80e9)),
        "heat_map": plot.heat_map(dataclasses.replace(_criticality(), ops=alone)),
        "gantt": plot.gantt(_step_of(step, 1)),
    }


def test_one_of_everything_many_and_long_names_leave_room(step):
    for name, ax in _extremes(step).items():
        ax.figure.draw_without_rendering()
        for axis in (ax.xaxis, ax.yaxis):
            boxes = _boxes(axis)
            assert boxes, name
            assert not any(a.overlaps(b) for a, b in it.combinations(boxes, 2)), name
        assert ax.get_window_extent().width > 0.35 * ax.figure.bbox.width, name
        if name in ("memory", "heat_map", "gantt"):
            assert len(_boxes(ax.yaxis)) == 1, name
        if (legend := ax.get_legend()) and name in ("tornado", "memory", "gantt"):
            assert not legend.get_window_extent().overlaps(ax.get_window_extent()), name
        names = [label.get_window_extent() for label in ax.get_yticklabels()]
        for text in ax.texts:
            assert not any(text.get_window_extent().overlaps(box) for box in names), name


def _grey(color):
    r, g, b = matplotlib.colors.to_rgb(color)
    return 0.299 * r + 0.587 * g + 0.114 * b


def test_lines_of_one_picture_differ_without_colour(step):
    for name, ax in _pictures(step).items():
        lines = [line for line in ax.lines if not line.get_label().startswith("_")]
        for a, b in it.combinations(lines, 2):
            alike = abs(_grey(a.get_color()) - _grey(b.get_color())) < 0.1
            styles = [
                (x.get_linestyle(), x._dash_pattern, x.get_marker(), x.get_linewidth())
                for x in (a, b)
            ]
            assert not alike or styles[0] != styles[1], (name, a.get_label(), b.get_label())


def _line(ax, label):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found.get_xydata()


def test_a_law_is_plotted_as_it_is():
    ax = plot.histogram(_LAW, _MEASURED)
    predicted, measured = (patch.get_data() for patch in ax.patches)
    expected = 100 * np.diff(_LAW.cdf(predicted.edges))
    np.testing.assert_allclose(predicted.values[1:], expected[1:], rtol=1e-12)
    assert 99.7 < predicted.values.sum() <= 100
    inside = np.mean(measured.edges[-1] >= _MEASURED)
    np.testing.assert_allclose(measured.values.sum(), 100 * inside, rtol=1e-12)
    at = [line.get_xdata()[0] for line in ax.lines]
    np.testing.assert_allclose(at, _LAW.quantile(np.array([0.05, 0.5, 0.95, 0.99])))
    shown = _line(plot.cdf(_LAW), "predicted")
    np.testing.assert_allclose(_LAW.quantile(shown[:, 1]), shown[:, 0])
    points = _line(plot.qq(_LAW, _MEASURED[::-1]), "80 measured steps")
    np.testing.assert_array_equal(points[:, 1], _MEASURED)
    np.testing.assert_allclose(points[:, 0], _LAW.quantile((np.arange(80) + 0.5) / 80))


def test_tornado_sorts_parts_by_cost():
    found = _sensitivity()
    ax = plot.tornado(found)
    names = [label.get_text() for label in ax.get_yticklabels()]
    # To first order only, all_gather costs more than the rank does in simulation.
    assert names == ["gemm", "all_gather", "rank", "GPUs of rank 11"]
    by_name = {part.name: part for part in found.parts}
    slopes = _line(ax, "first order")[:, 0]
    spreads = [by_name[name].spread for name in names]
    np.testing.assert_allclose(slopes, [1e3 * spread.value for spread in spreads if spread])
    bars = [patch.get_width() for patch in ax.patches]
    gains = [by_name[name].gain for name in names]
    np.testing.assert_allclose(bars, [1e3 * gain.value for gain in gains if gain])
    ax = plot.tornado(found, of="mean", top=2)
    np.testing.assert_allclose([patch.get_width() for patch in ax.patches], [20, 15])


def test_a_heat_map_weighs_ops_by_their_latency():
    found = _criticality()
    values = plot.heat_map(found, phase="B").images[0].get_array()
    ops = found.ops
    for stage, microbatch in it.product(range(3), range(4)):
        mine = (ops["stage"] == stage) & (ops["microbatch"] == microbatch)
        (backward,) = ops["probability"][mine & (ops["phase"] == "B")]
        assert values[stage, microbatch] == pytest.approx(backward)
    both = plot.heat_map(found).images[0].get_array()
    mine = (ops["stage"] == 1) & (ops["microbatch"] == 2) & (ops["phase"] != "SR")
    expected = np.average(ops["probability"][mine], weights=ops["latency_s"][mine])
    assert both[1, 2] == pytest.approx(expected)


def test_sizes_layouts_and_runs_are_plotted_as_they_are():
    rows = sorted(_rows(), key=lambda row: row["gpus"])
    ax = plot.scale(_rows(), "gpus")
    lines = {line[0].get_linestyle(): line[0].get_xydata() for line in ax.containers}
    np.testing.assert_allclose(lines["-"], [(row["gpus"], row["mean_s"]) for row in rows])
    np.testing.assert_allclose(lines["--"], [(row["gpus"], row["p95_s"]) for row in rows])
    ax = plot.layouts(
        [{**row, "mean [s]": row["mean_s"], "p95 [s]": row["p95_s"]} for row in _rows()]
    )
    np.testing.assert_allclose(_line(ax, "p95")[:, 0], [row["p95_s"] for row in _rows()])
    assert [x.get_text() for x in ax.get_yticklabels()] == [row["layout"] for row in _rows()]
    law = _run_law()
    ax = plot.training_run(law, deadline_days=55.0)
    shown = ax.patches[0].get_data()
    counts, _ = np.histogram(law.days, shown.edges)
    np.testing.assert_allclose(shown.values, counts / 50)
    assert f"deadline: {100 * law.probability(55.0).value:.3g} % by then" in {
        line.get_label() for line in ax.lines
    }


def test_parts_and_memory_are_plotted_as_they_are():
    ax = plot.breakdown(_PARTS)
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], [*_PARTS.values()])
    assert [x.get_text() for x in ax.get_yticklabels()] == [*_PARTS]
    shares = {text.get_text() for text in ax.texts}
    assert {"84.5 %", "-1.4 %"} < shares
    refusal(lambda: plot.breakdown({}), "`parts` is empty")
    found = _memory()
    ax = plot.memory(found)
    ends = np.zeros(len(found.ranks))
    for bars in ax.containers:
        np.testing.assert_allclose([bar.get_x() for bar in bars], ends)
        ends += [bar.get_width() for bar in bars]
    np.testing.assert_allclose(ends, [rank.bytes / 2**30 for rank in found.ranks])
    assert [bars.get_label() for bars in ax.containers][-1] == "others"
    assert "usable: 74.51 of 74.51 GiB" in {line.get_label() for line in ax.lines}


def test_given_axes_are_used_and_bad_input_is_one_sentence(monkeypatch):
    ax = matplotlib.figure.Figure().subplots()
    assert plot.cdf(_LAW, ax=ax) is ax
    refusal(lambda: plot.cdf(_LAW, ax=3), "give matplotlib's axes")
    refusal(lambda: plot.qq(_LAW, [1.0, -1.0]), "positive number of seconds")
    refusal(lambda: plot.scale(_rows(), "gpu"), "No column `gpu`; did you mean `gpus`")
    refusal(lambda: plot.heat_map(_criticality(), phase="W"), "known are B, F")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    refusal(lambda: plot.cdf(_LAW), 'pip install "prism_jax[plot]"', ImportError)


def test_a_sampled_step_runs_as_an_event_loop_does(program, step):
    """Starts, ends, the path and the step time agree with each other, and the step with its
    quantile."""
    ops = step.ops
    before = [()] * program.num_ops
    levels = program.levels
    for lanes, waits in zip(levels.ops, levels.predecessors, strict=True):
        for op, of in zip(lanes.tolist(), waits.tolist(), strict=True):
            if op >= 0:
                before[op] = tuple(x for x in of if x >= 0)
    latency = ops["end_s"] - ops["start_s"]
    np.testing.assert_allclose(event_loop_ends(before, latency.tolist()), ops["end_s"])
    path = step.path
    np.testing.assert_array_equal(ops["end_s"][path[:-1]], ops["start_s"][path[1:]])
    assert ops["start_s"][path[0]] == 0
    np.testing.assert_array_equal(np.sort(path), np.flatnonzero(ops["critical"]))
    assert step.reduction_s[step.last_rank, 0] == ops["end_s"][path[-1]]
    assert step.barrier_s == step.reduction_s[:, 1].max()
    assert np.all(step.reduction_s[:, 1] > step.reduction_s[:, 0])
    tail = step.step_s - step.barrier_s
    assert tail == pytest.approx(0.3, rel=0.5)  # The optimizer's.
    steps = simulated_steps(program, num_samples=512, key=jax.random.key(0)).steps
    assert np.mean(steps <= step.step_s) == pytest.approx(0.9, abs=1 / 512)
    sends = np.flatnonzero(ops["phase"] == "SR")
    receivers = step.receivers[sends]
    assert np.all(receivers >= 0)
    assert np.all(ops["start_s"][receivers] >= ops["end_s"][sends])
    np.testing.assert_array_equal(abs(ops["rank"][receivers] - ops["rank"][sends]), 1)


def test_the_gantt_chart_has_all_ops_and_the_path(step):
    ax = plot.gantt(step)
    bars = [c for c in ax.collections if c.get_paths()]
    spans = sum(len(c.get_paths()) for c in bars)
    compute = step.ops["phase"] != "SR"
    assert spans == compute.sum() + step.num_ranks
    times, ranks = critical_line(step)
    np.testing.assert_allclose(_line(ax, "critical path"), np.stack([times, ranks], axis=1))
    assert np.all(np.diff(times) >= -1e-12)
    assert (times[0], times[-1]) == (0.0, step.step_s)


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    """What the format allows of the kinds of events that are written."""

    ph: str
    name: str
    pid: int
    tid: int
    args: dict = {}
    cat: str = ""
    ts: float = -1.0
    dur: float = -1.0
    id: int = -1
    bp: str = ""


def test_a_chrome_trace_fits_its_schema(step):
    found = json.loads(json.dumps(plot.chrome_trace(step), allow_nan=False))
    assert {*found} == {"displayTimeUnit", "otherData", "traceEvents"}
    events = msgspec.convert(found["traceEvents"], list[_Event])
    names = {(e.pid, e.tid): e.args["name"] for e in events if e.name == "thread_name"}
    assert [e.args["name"] for e in events if e.name == "process_name"] == [
        "critical path",
        *(f"rank {r}" for r in range(step.num_ranks)),
    ]
    # Perfetto merges threads of one id, and takes 0 for the kernel's.
    tids = {tid for _, tid in names}
    assert len(tids) == len(names)
    assert 0 not in tids
    slices: dict = {}
    for e in events:
        assert e.ph in "MXsf"
        if e.ph == "X":
            assert e.ts >= 0
            assert e.dur >= 0
            assert (e.pid, e.tid) in names
            slices.setdefault((e.pid, e.tid), []).append((e.ts, e.ts + e.dur))
    for spans in slices.values():  # A thread does one thing at a time.
        spans.sort()
        assert all(a[1] <= b[0] + 2e-3 for a, b in it.pairwise(spans))
    starts, ends = ({e.id: e for e in events if e.ph == ph} for ph in "sf")
    assert len(starts) == np.sum(step.ops["phase"] == "SR")
    assert starts.keys() == ends.keys()
    for id_, start in starts.items():
        assert names[start.pid, start.tid].startswith("send_recv")
        assert names[ends[id_].pid, ends[id_].tid] == "compute"
        assert any(a == start.ts for a, _ in slices[start.pid, start.tid])
        assert any(a == ends[id_].ts for a, _ in slices[ends[id_].pid, ends[id_].tid])
    marked = [e for e in events if e.cat == "user_annotation" and e.args.get("phase")]
    assert [e.args["critical"] for e in marked] == step.ops["critical"].tolist()
    path = [e.dur for e in events if e.cat == "critical_path"]
    assert sum(path) == pytest.approx(1e6 * step.step_s, rel=1e-9)


def test_the_ranks_of_a_profile_stand_below_those_that_are_predicted(step):
    """Each with threads of its own, and the times of its median step."""
    ranks = median_steps(read_rank_traces(_PROFILE))
    (rows,) = ranks.values()
    backward = [end - start for _, name, start, end in rows if name == "backward-compute 0"]
    assert len(backward) == 1
    events = msgspec.convert(plot.chrome_trace(step, ranks)["traceEvents"], list[_Event])
    measured = [e for e in events if e.cat == "measured"]
    assert [1e-6 * e.dur for e in measured] == pytest.approx([b - a for *_, a, b in rows], abs=1e-9)
    assert min(e.ts for e in measured) >= 0
    assert max(e.ts + e.dur for e in measured) == pytest.approx(20_000)
    assert {e.name for e in measured} >= {"forward-compute 0", "optimizer", "reduce_scatter"}
    own = {e.tid for e in measured}
    assert own.isdisjoint(e.tid for e in events if e.ph == "X" and e.cat != "measured")
    assert {e.args["name"] for e in events if e.name == "process_name"} >= {"rank 0, measured"}


def test_a_written_trace_is_read_back_by_the_reader_of_profiles(step, tmp_path):
    plot.save_chrome_trace(step, tmp_path / "step.json")
    (rank,) = read_rank_traces(tmp_path / "step.json")
    spans = rank.spans
    names = np.array(spans.names)[spans.name]
    for op in range(len(step.receivers)):
        (i,) = np.flatnonzero(names == op_name(step, op))
        assert abs(spans.start[i] - 1e9 * step.ops["start_s"][op]) <= 1
        assert abs(spans.end[i] - 1e9 * step.ops["end_s"][op]) <= 2
    number = len(step.receivers) + 3 * step.num_ranks  # The step, the reduction, the optimizer.
    assert len(spans) == number


def test_timeline_on_the_command_line(step, tmp_path, answered, refused, monkeypatch):
    sampled = []
    monkeypatch.setattr(
        "prism_jax.analysis.sample_step", lambda program, quantile: sampled.append(quantile) or step
    )
    monkeypatch.setattr("prism_jax.cli._load.compiled", lambda arguments, job, programs: (None, {}))
    out = tmp_path / "step.json"
    result = answered(["timeline", "megatron-22b-a100-8", "--out", str(out), "--json"])
    assert result["step_s"] == step.step_s
    assert json.loads(out.read_text())["otherData"]["step_s"] == step.step_s
    levels = ["--quantile", "p99", "--quantile", "0.5", "--force"]
    answered(["timeline", "megatron-22b-a100-8", "--out", str(out), "--json", *levels])
    assert sampled == [0.5, 0.99, 0.5]
    assert "--quantile: `2` must be a number from 0 to 1" in refused(
        ["timeline", "megatron-22b-a100-8", "--out", "x", "--quantile", "2"]
    )
    assert (
        refused(["timeline", "megatron-22b-a100-8", "--out", str(tmp_path / "no/x.json")]).count(
            "\n"
        )
        == 1
    )


def test_a_picture_of_a_law_that_does_not_vary():
    law = dataclasses.replace(_run_law(), days=np.full(10, 3.0))
    ax = plot.training_run(law)
    ax.figure.savefig(io.BytesIO())
    low, high = ax.get_xlim()
    assert low < 3.0 < high
