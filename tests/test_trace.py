import os
import subprocess
import sys

import jax
import msgspec
import numpy as np
import polars as pl
import pytest
from scipy.stats import norm

import prism_jax as prism
from prism_jax.analysis import score
from prism_jax.cli import main
from prism_jax.data import Call, Job, Layout, Outline, ScheduleConfig, load_job
from prism_jax.engine import simulate
from prism_jax.law import crps
from prism_jax.profile import ladder, replayed_step_times, step_graph, traced_graph
from prism_jax.profile._fit import match_steps
from prism_jax.schedule import order_of
from prism_jax.trace import (
    Trace,
    _read_kernels,
    _tables,
    outline,
    read_factors,
    read_kernels,
    read_runs,
    stages_of_ranks,
)

from .helpers import law_of_profile


_TRACES = ("stage_imbalance", "slow_worker")


def _traced(shared, name):
    folder = shared / "data/straggler_traces"
    job = load_job(folder / f"{name}_job.toml")
    return prism.read_trace(folder / f"{name}.parquet", job), folder / f"{name}_step_times.csv"


def _self(dp, pp):
    return tuple(("self",) * pp for _ in range(dp))


def _job(dp=2, pp=2, microbatches=4):
    schedule = ScheduleConfig(kind="1f1b", num_microbatches=microbatches)
    return Job(Layout(dp=dp, pp=pp), schedule, name="made")


def _made_trace(job, steps, latency, *, seed=0, worker_step=0.0, gathered=()):
    """A trace of a step of which `latency(kind, worker, microbatch, rng)` gives all ops.
    `worker_step` is the spread of a factor that a worker's compute has in a step; `gathered` are
    kinds of compute that replicas begin together."""
    dp, pp, microbatches = job.layout.dp, job.layout.pp, job.schedule.num_microbatches
    calls = microbatches * job.schedule.virtual_stages
    scopes = {"params-all-gather": "dp", "grads-reduce-scatter": "dp", "optimizer": "self"}
    before, *after = (Call(op, scope, _self(dp, pp)) for op, scope in scopes.items())
    step = step_graph(job, Outline((before,), tuple(after), gathered=gathered))
    rng = np.random.default_rng(seed)
    shape = (steps, dp, pp)
    computes = step.computes.tolist()  # Of all ops, found anew each time that it is asked for.
    compute = {op for op, is_one in zip(step.op, computes, strict=True) if is_one}
    pipelined = ["forward-compute", *sorted(compute - {"forward-compute"})]
    pipelined[1:1] = ["forward-send", "forward-recv"]
    pipelined += ["backward-send", "backward-recv"]
    start = {op: np.full((*shape, calls), np.nan) for op in pipelined}
    start |= {op: np.full((*shape, 1), np.nan) for op in scopes}
    end = {op: x.copy() for op, x in start.items()}
    factors = latency("microbatch", None, None, rng)
    of_workers = np.exp(worker_step * np.random.default_rng(seed).standard_normal((steps, dp * pp)))
    for t in range(steps):
        common = np.exp(factors * rng.standard_normal((dp, microbatches)) - factors**2 / 2)
        ends = np.empty(step.graph.num_ops)
        for op, kind in enumerate(step.kind):
            waits = [ends[p] for p in step.graph.predecessors[op]]
            ready, worker, call = max(waits, default=0.0), step.members[op][0], step.call[op]
            seconds = latency(kind, worker, call, rng)
            if computes[op]:
                seconds *= common[worker // pp, call] * of_workers[t, worker]
            ends[op] = ready + seconds
            for i, member in enumerate(step.members[op]):
                place = (t, member // pp, member % pp, step.calls[op][i])
                name = step.op[op]
                if "send_recv" in kind:
                    name += "-recv" if i else "-send"
                if not kind.startswith("launch"):
                    start[name][place], end[name][place] = ready, ends[op]
    if pp == 1:
        start, end = ({k: v for k, v in x.items() if k[-4:] not in _SENT} for x in (start, end))
    return Trace(job, np.arange(steps), start, end, {})


_SENT = ("send", "recv")


def _rows(trace):
    rows = []
    ranks, number = _stages(trace.job), trace.job.schedule.num_microbatches
    for op, start in trace.start.items():
        for t, d, s, call in np.argwhere(~np.isnan(start)).tolist():
            seconds = trace.end[op][t, d, s, call] - start[t, d, s, call]
            place = (d, s, ranks[s][call // number], int(trace.steps[t]), op, call % number)
            rows.append((*place, start[t, d, s, call], seconds))
    names = ("dp_rank", "stage", "virtual_stage", "step", "optype", "seq_id")
    table = pl.DataFrame(rows, schema=(*names, "start_ts", "duration"), orient="row")
    return table if trace.job.schedule.virtual_stages > 1 else table.drop("virtual_stage")


def _stages(job):
    return stages_of_ranks(order_of(job.schedule, job.layout).stage_to_rank, job.layout.pp)


def _plain(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.03
    if kind.startswith("launch"):
        return 1e-5
    mean = {"forward-compute": 0.1, "backward-compute": 0.2, "optimizer": 0.02}.get(kind, 1e-3)
    slow = 1.3 if worker == 1 and kind.endswith("-compute") else 1.0
    return mean * slow * np.exp(0.01 * rng.standard_normal())


@pytest.mark.parametrize("name", _TRACES)
def test_the_replay_of_a_trace_gives_back_its_steps(shared, name):
    trace, path = _traced(shared, name)
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    measured = prism.read_step_times(path)
    np.testing.assert_allclose(again, measured, rtol=5e-3)
    assert np.corrcoef(again, measured)[0, 1] >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", _TRACES)
@pytest.mark.parametrize("first", [0, 1])
def test_a_fit_to_half_of_the_steps_predicts_the_others(shared, name, first):
    trace, path = _traced(shared, name)
    profile = prism.fit_profile(trace[first::2])
    law = simulate(prism.compile_profile(profile), num_samples=50_000, key=jax.random.key(1))
    measured = prism.read_step_times(path)[1 - first :: 2]
    found = score(law, measured, key=jax.random.key(0))
    assert abs(found.values["mean_error"]) < 0.02
    assert abs(found.values["p95_error"]) < max(0.02, 1.96 * found.noise["p95_error"])
    ratio, noise = found.values["std_ratio"], found.noise["std_ratio"]
    assert 0.67 - 1.96 * noise < ratio < 1.5 + 1.96 * noise


def test_untraced_waits_of_a_worker_are_found(shared):
    """In `slow_worker`, other replicas' last stages wait untraced for that of the slow one."""
    trace, _ = _traced(shared, "slow_worker")
    first = outline(trace).after[0]
    assert first.op == "layernorm-grads-all-reduce"
    assert [row[3] for row in first.waits_for] == ["pp", "dp", "dp", "dp"]
    assert all(row[1] == "self" for row in first.waits_for[1:])


def test_components_are_recovered_from_a_made_trace():
    trace = _made_trace(_job(4, 2, 8), 60, _plain)
    profile = prism.fit_profile(trace)
    means = {(m.kind, m.dp_rank, m.stage): m.mean_s for m in profile.means}
    # 480 ops with a spread of 3.2 % each.
    assert means["forward-compute", 1, 0] == pytest.approx(0.1, rel=4 * 0.032 / np.sqrt(480))
    assert means["backward-compute", 0, 1] == pytest.approx(0.26, rel=4 * 0.032 / np.sqrt(480))
    laws = {(v.kernel, v.component): v for v in profile.variability}
    # 1,920 microbatches.
    sigma = laws["", "microbatch"].parameters["sigma"]
    assert sigma == pytest.approx(0.03, rel=4 / np.sqrt(2 * 1920))
    residual = laws["forward-compute", "residual"]
    spread = {"lognormal": "sigma", "normal": "std", "gamma": "cv"}[residual.family]
    assert residual.parameters[spread] == pytest.approx(0.01, rel=0.1)
    law = law_of_profile(profile)
    measured = trace.step_times()
    assert law.mean == pytest.approx(measured.mean(), rel=4 * measured.std() / measured.mean() / 7)
    assert 0.67 < law.std / measured.std() < 1.5


def _with_factor(trace, factors):
    """The same steps, every op of each longer by the step's factor."""
    start, end = (
        {op: x * factors[:, None, None, None] for op, x in table.items()}
        for table in (trace.start, trace.end)
    )
    return Trace(trace.job, trace.steps, start, end, {})


def _laws_and_components(profile):
    laws = {(v.kernel, v.component): v.parameters for v in profile.variability}
    numbers = {c.name: (c.value or 0.0, c.standard_error or 0.0) for c in profile.fitted.components}
    return laws, numbers


@pytest.mark.parametrize(("steps", "seed"), [(20, 0), (20, 1), (20, 2), (60, 3)])
def test_the_step_component_and_the_step_law_are_one_number(tmp_path, steps, seed):
    """They were estimated twice: 20 steps had a component of 0.0087 and a law of 0.0049."""
    factors = np.exp(0.01 * np.random.default_rng(100 + seed).standard_normal(steps))
    profile = prism.fit_profile(
        _with_factor(_made_trace(_job(), steps, _plain, seed=seed), factors)
    )
    laws, found = _laws_and_components(profile)
    step, error = found["step"]
    assert laws["", "step"]["sigma"] == step
    assert laws["", "microbatch"]["sigma"] == found["microbatch"][0]
    # Of these steps; 20 factors of 0.01 scatter by a sixth themselves. The mean of eight
    # microbatches scatters by as much as a step's factor, which is what makes the error.
    true = np.std(np.log(factors), ddof=1)
    assert abs(step - true) < 2 * error
    assert error < 0.005
    prism.save_profile(profile, tmp_path / "p")
    assert _laws_and_components(prism.load_profile(tmp_path / "p")) == (laws, found)


def test_a_spread_that_compute_does_not_have_is_the_steps():
    """The component and the law take it, and stay one number."""
    trace = _made_trace(_job(), 60, _alike, seed=6)
    profile = prism.fit_profile(trace)
    times = trace.step_times()
    assert match_steps(profile, times) == profile
    rng = np.random.default_rng(6)
    wide = match_steps(profile, times * np.exp(0.03 * rng.standard_normal(len(times))))
    laws, found = _laws_and_components(wide)
    assert laws["", "step"]["sigma"] == found["step"][0]
    assert abs(found["step"][0] - 0.03) < 2 * found["step"][1]


def test_a_median_that_is_off_is_noted():
    """By more than 1 %, and by more than that of the same steps can be off by chance."""
    trace = _made_trace(_job(), 20, _alike, seed=6)
    profile, times = prism.fit_profile(trace), trace.step_times()

    def noted(steps):
        return any("median" in note for note in match_steps(profile, steps).fitted.notes)

    def skewed(number, low):
        """Steps of the same mean of which four in five are shorter than it."""
        return times.mean() * np.repeat([1 - low, 1 + 4 * low], [4 * number // 5, number // 5])

    assert not noted(times)
    # Standard errors of 0.756 * 2.5 low / number^0.5, of which three count.
    assert noted(skewed(200, 0.03))
    assert not noted(skewed(20, 0.03))
    assert not noted(skewed(5_000, 0.006))


def test_a_law_is_scaled_where_chance_does_not_explain_its_mean():
    """Where processes share cores, the law of what each of them takes has another mean than steps.
    Then all means are scaled; not where chance explains it, as with one step ten times as long.
    """
    trace = _made_trace(_job(), 20, _alike, seed=6)
    profile, times = prism.fit_profile(trace), trace.step_times()
    assert profile.fitted.level == 1
    law = law_of_profile(profile)
    for factor in (0.92, 0.98, 1.05):
        steps = factor * times / times.mean() * law.mean
        scaled = match_steps(profile, steps)
        off = 1 / factor - 1
        chance = max(steps.std(ddof=1), law.std) ** 2 / len(steps) / steps.mean() ** 2
        level = 1 / (1 + off * (1 - chance / off**2))
        assert scaled.fitted.level == pytest.approx(level, rel=1e-3)
        assert law_of_profile(scaled).mean == pytest.approx(level * law.mean, rel=1e-4)
        assert "scaled by" in scaled.fitted.notes[-1]
    late = np.where(np.arange(20) == 7, 10 * times, times)
    assert match_steps(profile, late).fitted.level == 1
    noisy = times * np.exp(0.1 * norm.ppf((np.arange(20) + 0.5) / 20))
    assert match_steps(profile, noisy * 1.01).fitted.level == 1
    for factor in (0.85, 1.2):
        with pytest.raises(ValueError, match=r"difference of more than 10 % is not corrected"):
            match_steps(profile, factor * times)


def test_the_ladder_ends_at_the_level():
    trace = _made_trace(_job(), 20, _alike, seed=6)
    profile = match_steps(prism.fit_profile(trace), 0.92 * trace.step_times())
    *_, stalls, level = ladder(trace, profile)
    assert (stalls.name, level.name) == ("stalls", "level")
    assert level.mean_s == pytest.approx(profile.fitted.level * stalls.mean_s)
    assert ladder(trace, prism.fit_profile(trace))[-1].mean_s == pytest.approx(stalls.mean_s)


def _alike(kind, worker, call, rng):
    return 0.0 if kind == "microbatch" else _plain(kind, worker, call, rng)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_factor_is_near_the_truth_where_microbatches_are_alike(seed):
    factors = np.exp(0.01 * np.random.default_rng(200 + seed).standard_normal(20))
    profile = prism.fit_profile(_with_factor(_made_trace(_job(), 20, _alike, seed=seed), factors))
    laws, found = _laws_and_components(profile)
    assert laws["", "step"]["sigma"] == found["step"][0]
    assert found["step"][0] == pytest.approx(np.std(np.log(factors), ddof=1), rel=0.1)


def test_residuals_are_not_divided_by_a_microbatch_factor_that_is_not_there():
    """The mean of a microbatch's four ops was taken for its factor, and took an eighth of the
    spread of each."""
    laws, found = _laws_and_components(prism.fit_profile(_made_trace(_job(), 60, _alike, seed=4)))
    assert found["microbatch"][0] < 0.0025
    assert found["residual"][0] == pytest.approx(0.01, rel=0.05)
    squares = [laws[f"{phase}-compute", "residual"] for phase in ("forward", "backward")]
    squares = [np.log1p(_cv(parameters) ** 2) for parameters in squares]
    assert np.sqrt(np.mean(squares)) == pytest.approx(found["residual"][0], rel=0.01)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_fit_has_the_mean_of_its_own_steps(blocking):
    """With transfers of 1 ms that block it was 0.49 % low. A recv's start makes no difference."""
    job = _job()
    schedule = msgspec.structs.replace(job.schedule, blocking=blocking)
    trace = _made_trace(msgspec.structs.replace(job, schedule=schedule), 60, _alike, seed=5)
    profile = prism.fit_profile(trace)
    law = law_of_profile(profile)
    steps = trace.step_times()
    noise = np.std(steps, ddof=1) / np.sqrt(len(steps)) / np.mean(steps)
    assert abs(law.mean / np.mean(steps) - 1) < 2 * noise < 0.001
    earlier = {op: x.copy() for op, x in trace.start.items()}
    for op in ("forward-recv", "backward-recv"):
        earlier[op][..., 1:] -= 5e-4  # A launch ends where the first starts.
    again = prism.fit_profile(Trace(trace.job, trace.steps, earlier, trace.end, {}))
    assert again.means == profile.means


def _cv(parameters):
    """Of the families that log-normal noise of 1 % is taken for."""
    (name,) = set(parameters) - {"shift"}
    spread = parameters[name]
    if "shift" in parameters:
        squared = np.exp(spread**2)
        return np.sqrt(squared * (squared - 1)) / (parameters["shift"] + np.sqrt(squared))
    return {"sigma": np.sqrt(np.expm1(spread**2)), "std": spread, "cv": spread}[name]


@pytest.mark.parametrize("sigma", [0.02, 0.05])
def test_a_profile_has_the_law_of_a_workers_step_factor(tmp_path, sigma):
    trace = _made_trace(_job(4, 2, 8), 60, _plain, seed=7, worker_step=sigma)
    profile = prism.fit_profile(trace)
    laws, found = _laws_and_components(profile)
    value, error = found["worker_step"]
    assert laws["", "worker_step"] == {"sigma": value}
    # 480 of them, less the means of 8 workers and of 60 steps.
    assert abs(value - sigma) < 3 * error
    assert error < 0.06 * sigma
    prism.save_profile(profile, tmp_path / "p")
    assert _laws_and_components(prism.load_profile(tmp_path / "p")) == (laws, found)
    # Nothing of it is left for the step as a whole, and steps spread as they did.
    assert found["step"][0] < 3 * found["step"][1]
    law = law_of_profile(profile)
    measured = trace.step_times()
    assert law.mean == pytest.approx(measured.mean(), abs=4 * measured.std() / np.sqrt(60))
    assert law.std == pytest.approx(measured.std(), rel=4 / np.sqrt(2 * 60))


def test_stalls_are_taken_apart_from_the_body():
    def stalling(kind, worker, call, rng):
        seconds = _plain(kind, worker, call, rng)
        if kind == "optimizer" and worker == 0 and rng.random() < 0.06:
            seconds += 0.4
        return seconds

    trace = _made_trace(_job(), 200, stalling)
    profile = prism.fit_profile(trace)
    (stall,) = [v for v in profile.variability if v.component == "stall"]
    assert stall.kernel == "optimizer"
    assert 200 * stall.parameters["rate"] == pytest.approx(12, abs=4 * np.sqrt(12))
    # It follows what the slower of the two stages does meanwhile.
    assert 0.3 < stall.parameters["median_s"] < 0.45
    residual = next(v for v in profile.variability if v.kernel == "optimizer")
    assert residual.component == "residual"
    assert max(residual.parameters.values()) < 0.02 or residual.family != "lognormal"


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    profile = prism.fit_profile(_made_trace(_job(), 12, _plain))
    assert not any("replay" in note for note in profile.fitted.notes)
    prism.save_profile(profile, tmp_path / "p")
    again = prism.load_profile(tmp_path / "p")
    assert again.outline == profile.outline
    assert again.layout == profile.layout
    assert again.means == profile.means
    assert [v.kernel for v in again.variability] == [v.kernel for v in profile.variability]
    laws = [
        simulate(
            prism.compile_profile(p), num_samples=2000, key=jax.random.key(0), sampling="plain"
        )
        for p in (profile, again)
    ]
    assert laws[0].mean == pytest.approx(laws[1].mean, rel=1e-5)


def test_a_written_trace_is_read_back(tmp_path):
    trace = _made_trace(_job(), 6, _plain)
    frame = _rows(trace)
    frame.write_csv(tmp_path / "t.csv")
    again = prism.read_trace(tmp_path / "t.csv", trace.job)
    assert set(again.start) == set(trace.start)
    np.testing.assert_allclose(again.step_times(), trace.step_times(), rtol=1e-9)
    # A row twice, and a step with a hole: counted, and left out.
    holed = frame.filter((pl.col("step") != 2) | (pl.col("optype") != "forward-compute"))
    pl.concat([holed, holed.head(3)]).write_parquet(tmp_path / "t.parquet")
    again = prism.read_trace(tmp_path / "t.parquet", trace.job)
    assert again.dropped == {"duplicate rows": 3, "steps with missing ops": 1}
    assert again.steps.tolist() == [0, 1, 3, 4, 5]


def _one_negative(frame):
    first = pl.int_range(pl.len()) == 0
    return frame.with_columns(duration=pl.when(first).then(-1.0).otherwise(pl.col("duration")))


def test_rows_that_contradict_another_are_counted_apart(tmp_path):
    trace = _made_trace(_job(), 2, _plain)
    frame = _rows(trace)
    other = frame.head(2).with_columns(duration=pl.col("duration") * 2)
    later = frame.tail(1).with_columns(start_ts=pl.col("start_ts") + 1)
    pl.concat([frame, frame.head(3), other, later]).write_parquet(tmp_path / "t.parquet")
    again = prism.read_trace(tmp_path / "t.parquet", trace.job)
    assert again.dropped == {"duplicate rows": 3, "rows that contradict another": 3}
    # The first of them stays.
    np.testing.assert_allclose(again.step_times(), trace.step_times(), rtol=1e-12)


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le"])
def test_text_in_16_bits_is_said_to_be(tmp_path, name):
    path = tmp_path / "s.csv"
    path.write_bytes("step_time_s\n1.5\n".encode(name))
    with pytest.raises(ValueError, match="text in UTF-16; save it in UTF-8"):
        read_runs(path)


@pytest.mark.parametrize(("factor", "noted"), [(1, False), (1e-6, True), (1e3, True)])
def test_steps_in_another_unit_are_noted(tmp_path, factor, noted):
    trace = _made_trace(_job(), 2, _plain)
    times = pl.col("start_ts", "duration") * factor
    _rows(trace).with_columns(times).write_parquet(tmp_path / "t.parquet")
    notes = prism.read_trace(tmp_path / "t.parquet", trace.job).notes
    assert any("in seconds" in note for note in notes) is noted


def test_whole_floats_are_numbers_of_steps(tmp_path):
    trace = _made_trace(_job(), 2, _plain)
    names = ("dp_rank", "stage", "step", "seq_id")
    _rows(trace).with_columns(pl.col(*names).cast(pl.Float64)).write_csv(tmp_path / "t.csv")
    again = prism.read_trace(tmp_path / "t.csv", trace.job)
    assert again.steps.tolist() == [0, 1]
    assert not again.dropped


def test_runs_are_sorted_by_their_steps(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("run,step,step_time_s\nb,3,1.3\na,2,2.2\nb,1.0,1.1\nb,2,1.2\na,1,2.1\n")
    assert [run.tolist() for run in read_runs(path)] == [[1.1, 1.2, 1.3], [2.1, 2.2]]
    assert prism.read_step_times(path).tolist() == [1.1, 1.2, 1.3, 2.1, 2.2]
    path.write_text("run,step_time_s\n1,3\n2,2\n1,1\n")
    assert [run.tolist() for run in read_runs(path)] == [[3, 1], [2]]


@pytest.mark.parametrize("names", [["zeta", "alpha", "8"], [3, -1, 7], [0.5, 2.0, 1e-3]])
@pytest.mark.parametrize("columns", [("step", "run"), ("run",), ("step",), ()])
def test_any_order_of_rows_has_the_same_runs(tmp_path, names, columns):
    rng = np.random.default_rng(0)
    rows = [(names[i % 3], i, 1 + 0.001 * i) for i in rng.permutation(60).tolist()]
    table = pl.DataFrame(rows, schema=["run", "step", "step_time_s"], orient="row")
    table.select(*columns, "step_time_s").write_parquet(tmp_path / "s.parquet")
    wanted: dict[object, list] = {}
    for run, step, seconds in rows:
        wanted.setdefault(run if "run" in columns else None, []).append((step, seconds))
    ordered = [sorted(run) if "step" in columns else run for run in wanted.values()]
    found = [run.tolist() for run in read_runs(tmp_path / "s.parquet")]
    assert found == [[seconds for _, seconds in run] for run in ordered]


@pytest.mark.parametrize("read", [read_runs, read_factors, read_kernels])
def test_rows_are_refused_by_the_footer_before_they_are_read(tmp_path, monkeypatch, read):
    path, read_rows = tmp_path / "t.parquet", []
    columns = {"step_time_s": [1.5] * 100, "factor": [1.0] * 100, "latency_s": [1.0] * 100}
    pl.DataFrame(columns | {"kernel": ["gemm"] * 100}).write_parquet(path)
    if read is read_kernels:
        pl.read_parquet(path).select("kernel", "latency_s").write_parquet(path)
    collect = _tables.collect
    for module, name in ((_tables, "_MOST_STEPS"), (_tables, "_MOST_GPUS")):
        monkeypatch.setattr(module, name, 99)
    monkeypatch.setattr(_read_kernels, "_MOST_SHAPES", 99)
    monkeypatch.setattr(
        _tables, "collect", lambda frame: read_rows.append(len(found := collect(frame))) or found
    )
    with pytest.raises(ValueError, match="it has 100 rows, and up to 99 are read; give fewer"):
        read(path)
    assert read_rows == [1]  # Their number.


def test_a_row_that_is_there_many_times_is_no_trace(tmp_path):
    trace = _made_trace(_job(), 1, _plain)
    row = _rows(trace).head(1)
    pl.concat([_rows(trace), row[np.zeros(100_000, int)]]).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="leave out what is there several times"):
        prism.read_trace(tmp_path / "t.parquet", trace.job)


_PEAK = """
import sys
from prism_jax.trace import read_runs
assert len(read_runs(sys.argv[1])) == 5
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(1024 * int(peak.split()[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="its memory is not told here")
def test_a_row_of_step_times_takes_up_to_40_bytes(tmp_path):
    rng, peaks = np.random.default_rng(0), []
    for number in (2 * 10**6, 8 * 10**6):
        path = tmp_path / f"{number}.parquet"
        run = pl.Series([f"run-{i}" for i in range(5)])[rng.integers(0, 5, number)]
        columns = {"run": run, "step": rng.permutation(number), "step_time_s": rng.random(number)}
        pl.DataFrame(columns).write_parquet(path)
        words = [sys.executable, "-c", _PEAK, str(path)]
        peaks.append(int(subprocess.run(words, capture_output=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 40 * 6 * 10**6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop("duration"), "column `duration` is missing"),
        (lambda f: f.with_columns(duration=-pl.col("duration")), "negative duration"),
        (lambda f: f.with_columns(optype=pl.lit("forward-computer")), "did you mean"),
        (lambda f: f.with_columns(dp_rank=pl.col("dp_rank") + 1), "not below dp = 2"),
        (lambda f: f.with_columns(stage=pl.col("stage") + 1), "not below pp = 2"),
        (lambda f: f.with_columns(seq_id=pl.col("seq_id") + 3), "not below num_microbatches = 4"),
        (lambda f: f.with_columns(duration=pl.lit("long")), "holds something else"),
        (lambda f: f.with_columns(start_ts=pl.lit(np.nan)), "not finite"),
        (lambda f: f.with_columns(dp_rank=pl.col("dp_rank") + 0.7), "a fractional `dp_rank`"),
        (lambda f: f.with_columns(step=pl.col("step") + 0.5), "a fractional `step`"),
        (lambda f: f.with_columns(seq_id=pl.col("seq_id") / 2), "a fractional `seq_id`"),
        (lambda f: f.with_columns(stage=pl.col("stage") == 1), "`stage` holds Boolean"),
        (lambda f: f.with_columns(start_ts=pl.lit(True)), "`start_ts` holds Boolean"),
        (lambda f: f.with_columns(start_ts=pl.lit("2026-01-01").str.to_datetime()), "Datetime"),
        (_one_negative, "1 row has a negative duration"),
        (lambda f: f.head(0), "no rows"),
        (lambda f: f.filter(pl.col("dp_rank") == 0), "missing in each of 2 steps"),
        (lambda f: f.filter(pl.col("optype") != "backward-compute"), "no `backward-compute`"),
        (lambda f: f.filter(pl.col("optype") != "forward-send"), "no `forward-send`"),
    ],
)
def test_bad_traces_are_refused_in_one_sentence(tmp_path, change, message):
    trace = _made_trace(_job(), 2, _plain)
    change(_rows(trace)).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=message) as error:
        prism.read_trace(tmp_path / "t.parquet", trace.job)
    assert "\n" not in str(error.value)


def test_crps_of_a_known_law():
    from scipy.special import ndtri

    quantiles = ndtri((np.arange(4000) + 0.5) / 4000)
    values = np.random.default_rng(0).standard_normal(200_000)
    # E|X - y| - E|X - X'| / 2 is 1 / sqrt(pi) for a forecast that is right.
    assert crps(quantiles, values) == pytest.approx(1 / np.sqrt(np.pi), rel=0.01)


def test_fit_score_and_simulate_from_the_command_line(tmp_path, answered, refused, capsys):
    trace = _made_trace(_job(), 20, _plain)
    _rows(trace).write_parquet(tmp_path / "t.parquet")
    (tmp_path / "job.toml").write_text(
        'kind = "job"\n[layout]\ndp = 2\npp = 2\n[schedule]\nkind = "1f1b"\nnum_microbatches = 4\n'
    )
    times = pl.DataFrame({"step_time_s": trace.step_times()})
    times.write_csv(tmp_path / "steps.csv")
    words = ["fit", f"{tmp_path}/t.parquet", "--job", f"{tmp_path}/job.toml", "--steps", "::2"]
    assert answered([*words, "--out", f"{tmp_path}/p", "--json"])["num_steps"] == 10
    words = ["score", f"{tmp_path}/p", "--against", f"{tmp_path}/steps.csv", "--steps", "1::2"]
    found = answered([*words, "--samples", "20000", "--json"])
    assert abs(found["mean_error"]["value"]) < 0.02
    (tmp_path / "same.csv").write_text("step_time_s\n1.5\n1.5\n1.5\n")
    words = ["score", f"{tmp_path}/p", "--against", f"{tmp_path}/same.csv", "--samples", "2000"]
    assert answered([*words, "--json"])["std_ratio"]["value"] is None
    assert main(words) == 0
    said = capsys.readouterr()
    assert "nan" not in said.out
    (line,) = [line for line in said.out.splitlines() if line.split()[:1] == ["std_ratio"]]
    assert line.split()[1:] == ["-", "-"]
    (tmp_path / "same.csv").write_text("step_time_s\n1e9\n1.5\n1.5\n")
    assert main(words) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 100
    law = answered(["simulate", f"{tmp_path}/p", "--samples", "20000", "--json"])
    assert law["step_time_s"]["mean"] == pytest.approx(trace.step_times().mean(), rel=0.02)
    for words, what in (
        (
            [
                "fit",
                f"{tmp_path}/t.parquet",
                "--job",
                f"{tmp_path}/job.toml",
                "--out",
                "x",
                "--steps",
                "9",
            ],
            "slice",
        ),
        (
            ["fit", f"{tmp_path}/no.parquet", "--job", f"{tmp_path}/job.toml", "--out", "x"],
            "no such file",
        ),
        (["score", f"{tmp_path}/p", "--against", f"{tmp_path}/t.parquet"], "step_time_s"),
        (["simulate", f"{tmp_path}/p", "--set", "layout.dp=4"], "profile"),
    ):
        assert what in refused(words)


def test_too_few_steps_are_refused():
    trace = _made_trace(_job(), 4, _plain)
    with pytest.raises(ValueError, match="at least 4"):
        prism.fit_profile(trace[:3])


def test_virtual_stages_need_their_column(tmp_path):
    trace = _made_trace(_job(), 2, _plain)
    _rows(trace).write_parquet(tmp_path / "t.parquet")
    schedule = ScheduleConfig(kind="interleaved-1f1b", num_microbatches=4, virtual_stages=2)
    with pytest.raises(ValueError, match="`virtual_stage` is missing, but the job has 2"):
        prism.read_trace(tmp_path / "t.parquet", Job(Layout(dp=2, pp=2), schedule, name="x"))


def _shifted(trace, op, seconds):
    """The same trace, one kind of op of one worker at other times."""
    start, end = ({k: x.copy() for k, x in table.items()} for table in (trace.start, trace.end))
    start[op][:, 0, 0] += seconds
    end[op][:, 0, 0] += seconds
    return Trace(trace.job, trace.steps, start, end, {})


def test_a_replay_that_is_off_is_no_fit(tmp_path, capsys):
    """Backward ops that start before the forward ops that they need."""
    trace = _made_trace(_job(), 6, _plain)
    step_time = trace.step_times().mean()
    early = _shifted(trace, "backward-compute", -step_time)
    with pytest.raises(ValueError, match="do not fit the order of the job's schedule"):
        prism.fit_profile(early)
    _rows(early).write_parquet(tmp_path / "t.parquet")
    (tmp_path / "job.toml").write_text(
        'kind = "job"\n[layout]\ndp = 2\npp = 2\n[schedule]\nkind = "1f1b"\nnum_microbatches = 4\n'
    )
    words = ["fit", f"{tmp_path}/t.parquet", "--job", f"{tmp_path}/job.toml"]
    assert main([*words, "--out", f"{tmp_path}/p"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert not said.out
    assert not (tmp_path / "p").exists()


def test_a_replay_that_is_a_little_off_is_noted():
    trace = _made_trace(_job(), 6, _plain)
    # One worker begins before what the outline says that it waits for.
    early = _shifted(trace, "params-all-gather", -0.02 * trace.step_times().mean())
    (note,) = [note for note in prism.fit_profile(early).fitted.notes if "replay" in note]
    assert "off by" in note


@pytest.mark.parametrize("idle", ["all", "one stage's forward", "none, all alike"])
def test_compute_that_takes_no_time_or_no_spread_is_fitted(idle):
    """Without a warning, and with a note of what was left out."""

    def latency(kind, worker, call, rng):
        if kind == "microbatch":
            return 0.0
        if kind.endswith("-compute") and idle == "all":
            return 0.0
        if kind == "forward-compute" and worker % 2 and idle != "none, all alike":
            return 0.0
        return {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)

    profile = prism.fit_profile(_made_trace(_job(), 6, latency))
    found = {c.name: c for c in profile.fitted.components}
    assert found["residual"].value is None
    notes = [note for note in profile.fitted.notes if "take no time" in note]
    assert len(notes) == (idle != "none, all alike")
    if idle == "one stage's forward":
        assert notes[0].startswith("48 of 192 ops")
