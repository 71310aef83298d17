"""Schedules that are read off traces: virtual stages, split backwards, any order."""

import jax
import msgspec
import numpy as np
import polars as pl
import pytest

import prism_jax as prism
from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.engine import simulate
from prism_jax.profile import replayed_step_times, step_graph, traced_graph
from prism_jax.schedule import make_schedule, order_of
from prism_jax.trace import outline, read_profile_traces, read_trace

from .test_kineto import _write
from .test_trace import _made_trace, _rows


def _config(kind):
    if kind != "custom":
        return ScheduleConfig(kind, 4, virtual_stages=1 if kind == "zb-h1" else 2)
    # Two stages on a rank in a V, as ZB-V, with two ops of a rank the other way round.
    orders = make_schedule("zbv", num_ranks=2, num_microbatches=4, virtual_stages=2).orders()
    orders[1][18:20] = orders[1][19:17:-1]
    orders = tuple(" ".join(order) for order in orders)
    return ScheduleConfig("traced", 4, virtual_stages=2, orders=orders)


def _job_of(kind):
    return Job(Layout(dp=2, pp=2), _config(kind), name="made")


def _unstated(job):
    """The job without its schedule."""
    schedule = ScheduleConfig("traced", job.schedule.num_microbatches)
    return Job(job.layout, schedule, name=job.name)


def _constant(kind, worker, call, rng):
    """Made latencies: each kind of op on each worker has its own."""
    if kind == "microbatch":
        return 0.0
    if kind.startswith("launch"):
        return 1e-5
    op, _, number = kind.partition(" ")
    seconds = {"forward-compute": 0.1, "backward-input": 0.12, "backward-weight": 0.07}
    seconds |= {"backward-compute": 0.2, "optimizer": 0.02}
    return seconds.get(op, 1e-3) * (1 + 0.1 * worker + 0.03 * int(number or 0))


def _varying(kind, worker, call, rng):
    noise = 0.0 if kind.startswith("launch") else 0.05
    return _constant(kind, worker, call, rng) * np.exp(noise * rng.standard_normal())


KINDS = ("interleaved-1f1b", "zb-h1", "custom")


@pytest.fixture(scope="module", params=KINDS)
def made(request):
    return _made_trace(_job_of(request.param), 5, _varying)


def _same(one, other, atol=1e-9, ahead=0.0):
    """Whether two traces have the same ops at the same times."""
    assert {*other.end} <= {*one.end}
    for op, end in other.end.items():
        np.testing.assert_allclose(one.end[op] - ahead, end, atol=atol)


def test_the_order_of_a_table_is_found_and_its_replay_gives_back_its_steps(tmp_path, made):
    path = tmp_path / "t.parquet"
    _rows(made).write_parquet(path)
    trace = read_trace(path, _unstated(made.job))
    orders = order_of(made.job.schedule, made.job.layout).orders()
    assert order_of(trace.job.schedule, trace.job.layout).orders() == orders
    assert trace.job.schedule.virtual_stages == made.job.schedule.virtual_stages
    assert not trace.notes
    _same(trace, made)
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    np.testing.assert_allclose(again, made.step_times(), rtol=1e-9)
    _same(read_trace(path, made.job), made)  # Stated, it is the same.


def test_the_ranges_of_a_profiler_tell_the_same(tmp_path, made):
    trace = read_profile_traces(_write(tmp_path / "k", made), _unstated(made.job))
    orders = order_of(made.job.schedule, made.job.layout).orders()
    assert order_of(trace.job.schedule, trace.job.layout).orders() == orders
    _same(trace, made, atol=2e-8, ahead=1e-4)
    again = replayed_step_times(*traced_graph(trace, outline(trace)))
    np.testing.assert_allclose(again, trace.step_times(), rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_of_constant_ops_has_their_step(tmp_path, kind):
    made = _made_trace(_job_of(kind), 5, _constant)
    _rows(made).write_parquet(tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet", _unstated(made.job))
    prism.save_profile(prism.fit_profile(trace), tmp_path / "p")
    profile = prism.load_profile(tmp_path / "p")
    assert profile.schedule == trace.job.schedule
    program = prism.compile_profile(profile)
    means = {(m.kind, m.dp_rank, m.stage): m.mean_s for m in profile.means}
    assert means["forward-compute" + " 1" * (kind != "zb-h1"), 1, 0] == pytest.approx(
        _constant("forward-compute" + " 1" * (kind != "zb-h1"), 2, 0, None)
    )
    if kind == "custom":  # The others take the same way.
        law = simulate(program, num_samples=64, key=jax.random.key(0), sampling="plain")
        assert law.mean == pytest.approx(made.step_times()[0], rel=1e-6)
    step = step_graph(profile.job, profile.outline)
    seconds = [[means[k, *divmod(m[0], 2)]] for k, m in zip(step.kind, step.members, strict=True)]
    replayed = replayed_step_times(step, step.by_kind(np.array(seconds)))
    assert replayed[0] == pytest.approx(made.step_times()[0], rel=1e-9)


def test_a_fit_of_varying_ops_has_the_mean_of_its_steps(made):
    """Of twelve kinds of compute on a worker: all laws are there, and no warning."""
    profile = prism.fit_profile(made)
    kinds = {v.kernel for v in profile.variability}
    step = step_graph(profile.job, profile.outline)
    assert {*step.phases} <= kinds
    assert {m.kind for m in profile.means} == {*step.kind}


@pytest.mark.parametrize(
    ("kind", "stated", "message"),
    [
        ("zb-h1", "1f1b", "op 2 of rank 1 is `1I0` in the trace, but `1B0` in the schedule `1f1b`"),
        ("custom", "zbv", "op 19 of rank 1 is `2I3` in the trace, but `1I2` in the schedule `zbv`"),
        ("custom", "interleaved-1f1b", "`virtual_stage` 2 is on rank .* 1, but .* puts it on 0"),
        ("interleaved-1f1b", "1f1b", "`virtual_stage` 2 is on rank .* 0, but .* no such stage"),
        ("interleaved-1f1b", "looped-bfs", "op .* of rank 0 is .* in the schedule `looped-bfs`"),
    ],
)
def test_the_first_op_that_is_not_as_stated_is_named(tmp_path, kind, stated, message):
    made = _made_trace(_job_of(kind), 3, _varying)
    _rows(made).write_parquet(tmp_path / "t.parquet")
    stages = made.job.schedule.virtual_stages if stated != "1f1b" else 1
    schedule = ScheduleConfig(stated, 4, virtual_stages=stages)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(tmp_path / "t.parquet", Job(made.job.layout, schedule, name="x"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f.with_columns(virtual_stage=pl.col("virtual_stage") * 2),
            "stage` 1 is missing",
        ),
        (lambda f: f.with_columns(virtual_stage=0), "is on the ranks .* 0 and 1"),
        (lambda f: f.with_columns(virtual_stage=-1), "not below 100000"),
        (lambda f: f.filter(pl.col("virtual_stage") < 3), "ranks have 1 to 2 stages"),
        (lambda f: f.filter(pl.col("optype") == "optimizer"), "no pipeline ops"),
        (
            lambda f: f.filter((pl.col("optype") != "backward-compute") | (pl.col("seq_id") < 3)),
            "`.F3` has no backward in most steps",
        ),
    ],
)
def test_stages_that_make_no_sense_are_refused(tmp_path, change, message):
    made = _made_trace(_job_of("interleaved-1f1b"), 2, _varying)
    change(_rows(made)).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=message) as error:
        read_trace(tmp_path / "t.parquet", _unstated(made.job))
    assert "\n" not in str(error.value)


def test_an_order_that_is_not_always_the_same_is_noted(tmp_path):
    made = _made_trace(_job_of("zb-h1"), 5, _varying)
    start, end = (x["backward-weight"] for x in (made.start, made.end))
    for times in (start, end):  # In one of five steps.
        times[1, :, 1, :2] = times[1, :, 1, [1, 0]].T
    _rows(made).write_parquet(tmp_path / "t.parquet")
    (note,) = read_trace(tmp_path / "t.parquet", made.job).notes
    assert note.startswith("in 20 % of its steps")


def test_a_traced_schedule_without_its_order_is_no_job():
    job = _unstated(_job_of("zb-h1"))
    with pytest.raises(ValueError, match="read off a trace"):
        order_of(job.schedule, job.layout)
    other = msgspec.structs.replace(job.schedule, orders=("0F0 0B0", "1F0 1B0"))
    with pytest.raises(ValueError, match="2 ranks, 2 stages and 1 microbatches"):
        order_of(other, job.layout)
    other = msgspec.structs.replace(other, kind="1f1b")
    with pytest.raises(ValueError, match="leave one out"):
        order_of(other, job.layout)
