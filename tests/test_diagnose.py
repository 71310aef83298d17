"""Diagnoses of step times and traces whose cause is known."""

import dataclasses
import json

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.calibration import STEP_LEVELS, possible_runs
from prism_jax.cli import main
from prism_jax.diagnosis import (
    diagnose,
    diagnose_ranks,
    hypotheses,
    settings_of,
    slow_ranks,
    wait_for_spare,
)
from prism_jax.diagnosis._changes import EFFECTS, Explained, simulated, with_bandwidth, with_setting
from prism_jax.diagnosis._diagnose import Hypotheses
from prism_jax.diagnosis._evidence import log_shapes, series_of, student
from prism_jax.logs import RankFactors
from prism_jax.trace import contents, median_step_times
from prism_jax.trace._spans import Kind, Message, RankTrace, SpanList


JOB = prism.load_job("gpt3-175b-h100-768")
SMALL = (
    *("layout.pp=2", "layout.dp=2", "cluster.num_nodes=2", "world_size=16"),
    *("schedule.kind=1f1b", "schedule.virtual_stages=1", "schedule.num_microbatches=2"),
    *("model.num_layers=2",),
)


@pytest.fixture(scope="module")
def of():
    """Causes with known effects on steps of one second, whose prediction has its usual errors."""
    steps = 1 + 0.003 * np.linspace(-2, 2, len(STEP_LEVELS))
    ones, zeros = np.ones((len(EFFECTS), len(steps))), np.zeros(len(EFFECTS))
    longer = ones * (1 + EFFECTS[:, None])
    stalls = ones + EFFECTS[:, None] / 0.05 * (STEP_LEVELS > 0.95)
    causes = (
        Explained("slow-rank", "factor", 1 + EFFECTS, longer, zeros),
        Explained("congested-link", "factor", 1 + EFFECTS, longer, zeros),
        Explained("stalls", "time lost", EFFECTS, stalls, zeros),
        Explained("drift", "growth", EFFECTS, longer, 2 * np.log1p(EFFECTS)),
    )
    return Hypotheses(JOB, 1.0, possible_runs(JOB, steps, 1.0), causes, ())


def _steps(seed: int, number: int = 150) -> np.ndarray:
    return 1 + 0.003 * np.random.default_rng(seed).standard_normal(number)


def test_probabilities_are_of_all_causes_and_none(of):
    found = diagnose(of, [_steps(0)])
    total = (found.nothing or 0) + sum(one.probability for one in found.causes)
    assert total == pytest.approx(1)
    shares = np.array([one.probability for one in found.causes])
    assert np.all(shares[1:] < 1.26 * shares[:-1])  # Equal ones are in the order of causes.


def test_steps_of_the_prediction_are_normal(of):
    for seed in range(3):
        found = diagnose(of, [_steps(seed)])
        assert found.normal
        assert (found.nothing or 0) > 0.5


def test_a_level_does_not_tell_causes_apart(of):
    found = diagnose(of, [1.4 * _steps(0)])
    assert not found.normal
    assert found.percentile > 99
    by_name = {one.name: one for one in found.causes}
    slow, link = by_name["slow-rank"], by_name["congested-link"]
    assert slow.probability == pytest.approx(link.probability)
    assert slow.indistinguishable
    assert slow.explains == pytest.approx(0.4, rel=0.2)
    assert not by_name["drift"].indistinguishable


@pytest.mark.parametrize("level", [1.15, 1.37, 1.9])
def test_a_narrow_prediction_tells_causes_apart_no_better(of, level):
    """As of a calibrated job, whose law falls between two effects, however unlikely no cause is."""
    error = msgspec.structs.replace(of.future.error, spread=1e-3, degrees=np.inf)
    narrow = dataclasses.replace(of, future=dataclasses.replace(of.future, error=error))
    found = diagnose(narrow, [np.array([level * np.median(of.future.levels)])])
    assert found.nothing == pytest.approx(0, abs=1e-9)
    slow, link, stalls = (
        next(cause.probability for cause in found.causes if cause.name == name)
        for name in ("slow-rank", "congested-link", "stalls")
    )
    assert slow == pytest.approx(link)
    assert slow == pytest.approx(stalls, rel=0.15)


@pytest.mark.parametrize("seed", range(2))
def test_stalls_and_drift_are_told_by_the_order_and_the_tail(of, seed):
    rng = np.random.default_rng(seed)
    paused = _steps(seed) + (rng.uniform(size=150) < 0.05) * rng.uniform(0.5, 2, 150)
    assert diagnose(of, [paused]).causes[0].name == "stalls"
    growing = _steps(seed) * np.linspace(1, 1.4, 150)
    assert diagnose(of, [growing]).causes[0].name == "drift"
    assert diagnose(of, [rng.permutation(growing)]).causes[0].name != "drift"


def test_a_stalling_loader_is_the_cause_in_a_log_too(of, tmp_path):
    """What a log leaves out as steps that do not count has none of the stalls."""
    rng = np.random.default_rng(5)
    paused = _steps(5) + (rng.uniform(size=150) < 0.05) * rng.uniform(0.5, 2, 150)
    lines = [
        f" iteration {i + 1:8d}/ 150 | elapsed time per iteration (ms): {1e3 * seconds:.1f} |"
        for i, seconds in enumerate(paused)
    ]
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines))
    measured = prism.read_log(log)
    assert not measured.left_out
    assert diagnose(of, measured.runs).causes[0].name == "stalls"


def test_one_step_time_has_a_level_only(of):
    level, slow = (diagnose(of, [np.array([x])]) for x in (1.0, 1.5))
    assert level.percentile is not None
    assert 20 < level.percentile < 80
    assert level.normal
    assert len({round(one.probability, 2) for one in slow.causes}) == 1


def test_the_trend_is_that_of_the_series_and_of_each_run():
    slope = series_of([_steps(0, 300) * np.exp(np.linspace(0, 0.2, 300))])
    assert slope.trend == pytest.approx(0.2, abs=3 * slope.trend_error)
    twice = series_of(
        [x * np.exp(np.linspace(0, 0.2, 300)) for x in (_steps(1, 300), _steps(2, 300))]
    )
    assert twice.trend == pytest.approx(0.2, abs=4 * twice.trend_error)
    assert twice.trend_error < slope.trend_error


def test_the_shape_has_no_unit():
    steps = np.stack([_steps(3), _steps(4)])
    np.testing.assert_allclose(log_shapes(7 * steps), log_shapes(steps), rtol=1e-9)
    assert np.exp(log_shapes(steps)[0, 0]) == pytest.approx(0.003, rel=0.2)


@pytest.mark.parametrize("degrees", [1.0, 3.0, np.inf])
def test_a_density_has_mass_one(degrees):
    z = np.tan(np.linspace(-np.pi / 2, np.pi / 2, 20_001)[1:-1])
    assert np.trapezoid(student(z, degrees), z) == pytest.approx(1, abs=1e-3)


def _traces(slow: int | None, num_ranks: int = 4, late: bool = False) -> list[RankTrace]:
    """Ranks that compute for 100 ms, or 160, and then all-reduce, or both at once. All leave the
    collective together.
    """
    found = []
    for rank in range(num_ranks):
        spans = SpanList()
        for step in range(6):
            start = int(step * 1e9)
            compute = 160 if rank == slow else 100
            begins = start + (compute if late else compute - 30) * 10**6
            end = start + (200 if late else 170) * 10**6
            spans.add(Kind.RANGE, start, end, f"ProfilerStep#{step}", "host")
            spans.add(Kind.HOST_OP, start, start + compute * 10**6, "aten::mm", "host")
            message = Message("all_reduce")
            spans.add(Kind.MESSAGE, begins, end, "gloo:all_reduce", "gloo", message=message)
        found.append(RankTrace(spans.spans(), {}, 0, rank))
    return found


def _ranks(*args, **options):
    return contents(_traces(*args, **options)).by_rank


def test_a_rank_is_slow_although_all_steps_are_equally_long():
    ranks = _ranks(slow=2)
    for one in ranks:
        compute = 0.16 if one.rank == 2 else 0.1
        np.testing.assert_allclose(one.step_times_s, 0.17)
        np.testing.assert_allclose(one.own_s, compute)
        np.testing.assert_allclose(one.hideable_s, (0.2 - compute, 0.17 - compute))
    found = diagnose_ranks(JOB, ranks)
    assert found.ranks.rank == 2
    assert found.causes[0].name == "slow-rank"
    assert found.percentile is None


def test_communication_after_compute_is_missing_overlap():
    late, sound = (diagnose_ranks(JOB, _ranks(None, late=x)) for x in (True, False))
    assert late.ranks.hidden == pytest.approx(0)
    assert late.causes[0].name == "no-overlap"
    assert sound.ranks.hidden == pytest.approx(0.3)
    assert (sound.nothing or 0) > (late.nothing or 0)


def test_traces_tell_apart_causes_with_equal_step_times(of):
    ranks = [
        dataclasses.replace(x, step_time_s=8 * x.step_time_s, own_s=8 * x.own_s)
        for x in _ranks(slow=1)
    ]
    assert diagnose(of, [1.36 * _steps(0)], ranks).causes[0].name == "slow-rank"
    alike = [x.name for x in diagnose(of, [1.36 * _steps(0)], ranks).causes if x.indistinguishable]
    assert alike == ["slow-rank"]


def test_ranks_need_one_common_step():
    one, other = _traces(None, 2)
    first = dataclasses.replace(one, spans=one.spans[np.arange(3)])
    assert median_step_times(contents([first, other]).by_rank) == pytest.approx([0.17])
    other = dataclasses.replace(other, spans=other.spans[np.arange(9, 18)])
    with pytest.raises(ValueError, match="2 traced ranks have no step in common"):
        median_step_times(contents([first, other]).by_rank)


@pytest.fixture(scope="module")
def simulated_causes():
    """What each cause does to the steps of a small job."""
    job = prism.load_job("gpt3-175b-h100-768", SMALL)
    return hypotheses(job, num_samples=256, key=jax.random.key(0))


# Cases like those that are asked about in public, and how many times as long their steps were: a
# network without RDMA, and one over TCP; a node that is throttled, and one that pages; kernels that
# are launched one by one; a loader that starves.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "factor"),
    [
        *(("congested-link", 2.84), ("congested-link", 8.0), ("slow-rank", 1.6)),
        *(("slow-rank", 18.0), ("launch-bound", 5.0), ("input", 3.0)),
    ],
)
def test_causes_beyond_a_factor_of_two_are_found(simulated_causes, cause, factor):
    explained = next(x for x in simulated_causes.causes if x.name == cause)
    place = int(np.argmin(np.abs(np.mean(explained.factors, axis=1) - factor)))
    rng = np.random.default_rng(7)
    usual = np.median(simulated_causes.future.shapes, axis=0) * simulated_causes.mean_s
    places = rng.integers(0, len(STEP_LEVELS), 200)
    found = diagnose(simulated_causes, [(usual * explained.factors[place])[places]])
    alike = [one.name for one in found.causes if one.indistinguishable]
    assert not found.normal
    assert found.causes[0].name == cause or (cause in alike and len(alike) <= 3)
    fitted = next(one for one in found.causes if one.name == cause)
    assert fitted.explains / simulated_causes.mean_s == pytest.approx(factor - 1, rel=0.2, abs=0.1)


@pytest.mark.slow
def test_slow_ranks_cost_what_a_simulation_says_and_restarts_pay():
    job = prism.load_job("gpt3-175b-h100-768", SMALL)
    factors = np.ones(16)
    options = {"num_samples": 128, "key": jax.random.key(3)}

    def of(compute, collectives=None, **costs):
        return slow_ranks(job, RankFactors(compute, collectives, 1, "a test"), **costs, **options)

    assert not of(factors).ranks
    links = np.where(np.arange(16) == 9, 3.0, 1.0)
    factors[[3, 12]] = 1.3, 1.1
    found = of(7 * factors, links, restart_s=100.0, wait_s=50.0, num_steps=2000)
    assert {(x.rank, x.pipeline_rank) for x in found.ranks} == {(3, 0), (12, 1), (9, None)}
    by_rank = {x.rank: x for x in found.ranks}
    assert [by_rank[rank].factor for rank in (3, 9, 12)] == pytest.approx([1.3, 3.0, 1.1])
    usual = simulated(job, 128, options["key"])
    cv = usual.steps.std() / usual.steps.mean()
    for one in found.ranks:
        if one.pipeline_rank is None:
            scenario = prism.Scenario(prism.compile_job(with_bandwidth(job, 1 / 3)))
        else:
            scenario = prism.slow_rank(usual.run.program, one.pipeline_rank, one.factor)
        cost = np.median(usual.of(scenario)) - np.median(usual.steps)
        assert one.p50 == pytest.approx(cost)
        assert one.moved_p50 <= one.p50
        assert one.drain_steps == pytest.approx(150 / one.p50)
        if one.move_steps is not None:
            assert one.move_steps == pytest.approx(100 / (one.p50 - one.moved_p50))
        loses = {"keep": 2000 * one.p50, "move": 100 + 2000 * one.moved_p50, "drain": 150.0}
        assert loses[one.pays] == min(loses.values())
        # 2 (1.96 + 1.28)^2 = 21.0 variances over the square of the change.
        share = one.p50 / np.median(usual.steps)
        assert one.steps_to_watch == max(2, np.ceil(21.015 * (cv / share) ** 2))
    assert found.ranks[0].p50 == max(one.p50 for one in found.ranks)
    with pytest.raises(ValueError, match="15 factors of ranks, and the job has 16"):
        of(factors[1:])


def test_what_can_be_set_keeps_the_batch_and_equals_a_job_that_says_so():
    job = prism.load_job("examples/job.toml")
    settings = {setting.name: setting for setting in settings_of(job)}
    dp, size, bandwidth, limit = settings
    assert [*settings[dp].factors] == [2, 4, 8]
    assert [*settings[size].factors] == [1, 2]
    now = prism.prediction.predict(job).mean
    for name, value, said in (
        (dp, 8, ["world_size=64", "schedule.num_microbatches=4"]),
        (size, 2, ["training.microbatch_size=2", "schedule.num_microbatches=4"]),
        (limit, 560.0, ["cluster.device.power.limit_w=560"]),
    ):
        expected = prism.load_job("examples/job.toml", said)
        assert with_setting(job, name, value).batch_size == expected.batch_size == job.batch_size
        mean = prism.prediction.predict(expected).mean
        assert settings[name].factors[value] == pytest.approx(mean / now, rel=1e-9)
        assert settings[name].factors[settings[name].own] == 1
    slower, same, faster = (settings[bandwidth].factors[x] for x in (0.5, 1.0, 2.0))
    assert slower > same == 1 > faster
    with pytest.raises(ValueError, match="do not divide the batch"):
        with_setting(job, dp, 3)
    assert [settings[x].label(settings[x].own) for x in (dp, bandwidth, limit)] == [
        "4",
        "x 1",
        "700 W",
    ]


@pytest.mark.slow
def test_what_can_be_set_has_the_factor_that_quantiles_of_simulated_steps_have():
    """Also where the graph is another, such as that of half the replicas."""
    job = prism.load_job("examples/job.toml")
    levels = np.array([0.05, 0.5, 0.95])

    def quantiles(of):
        options = {"num_samples": 8192, "key": jax.random.key(3)}
        return prism.simulate(prism.compile_job(of), **options).quantile(levels)

    own = quantiles(job)
    for setting in settings_of(job):
        value, factor = next(iter(setting.factors.items()))
        if value != setting.own:
            simulated_factor = quantiles(with_setting(job, setting.name, value)) / own
            np.testing.assert_allclose(simulated_factor, factor, rtol=0.005, err_msg=setting.name)


def test_draining_waits_where_spares_are_in_repair():
    """Closed forms: no spare is a repair; one is that times the chance that exactly no other node
    is in repair, which is Poisson.
    """
    failures = prism.load_failures("llama-3")
    taken = sum(cause.count for cause in failures.causes if cause.takes_node)
    mean = taken / failures.device_hours * 4096 * 30
    assert mean > 0.1
    for spares, wait_h in ((None, 0.0), (0, 30.0), (1, 30 * mean * np.exp(-mean))):
        wait = wait_for_spare(failures, 4096, 30 * 3600.0, spares)
        assert wait == pytest.approx(3600 * wait_h)


@pytest.mark.slow
def test_each_cause_makes_steps_longer_by_its_effects(simulated_causes):
    found = simulated_causes
    names = [cause.name for cause in found.causes]
    assert names[0] == "congested-link"
    assert {"slow-rank", "launch-bound", "input", "stalls", "drift"} <= {*names}
    assert "unbalanced-experts" not in names
    for cause in found.causes:
        means = cause.factors.mean(axis=1) - 1
        if cause.name not in ("stalls", "drift"):
            np.testing.assert_allclose(means, EFFECTS[: len(means)], rtol=0.1, atol=2e-3)
        assert np.all(np.diff(cause.values) > 0)
    assert all(change.p50 > 0 or change.p95 > 0 for change in found.changes)
    assert len(found.changes) <= 5
    for change in found.changes:
        prism.load_job("gpt3-175b-h100-768", [*SMALL, *change.set])


def test_diagnose_command_names_the_slow_rank(tmp_path, answered):
    path = tmp_path / "job.toml"
    path.write_text(
        'kind = "job"\n[layout]\ndp = 4\n[schedule]\nkind = "1f1b"\nnum_microbatches = 1\n'
    )
    folder = tmp_path / "traces"
    folder.mkdir()
    for trace in _traces(slow=3):
        (folder / f"rank{trace.rank}.json").write_text(_kineto(trace))
    found = answered(["diagnose", str(path), "--trace", str(folder), "--json"])
    assert found["ranks"]["rank"] == 3
    assert {"name", "probability", "explains"} <= found["causes"][0].keys()
    assert {"normal", "percentile", "changes"} <= found.keys()
    assert "rank 3 has most own work" in answered(["diagnose", str(path), "--trace", str(folder)])


def _kineto(trace: RankTrace) -> str:
    spans, category = trace.spans, {Kind.RANGE: "user_annotation", Kind.HOST_OP: "cpu_op"}
    events = [
        {
            "ph": "X",
            "cat": category.get(Kind(kind), "user_annotation"),
            "name": spans.names[name],
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "pid": 1,
            "tid": int(lane),
        }
        for kind, name, start, end, lane in zip(
            spans.kind, spans.name, spans.start, spans.end, spans.lane, strict=True
        )
    ]
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": trace.rank}})


def test_short_runs_have_a_level_only(of):
    """Twelve runs of one step have no trend, and one short run takes none from long ones."""
    alone = series_of([np.array([x]) for x in _steps(0, 12)])
    assert (alone.number, len(alone.steps), alone.trend_error) == (12, 0, 0)
    long = [_steps(seed, 20) for seed in (0, 1)]
    beside, without = series_of([*long, np.array([long[0][0]])]), series_of(long)
    assert (beside.number, beside.trend) == (41, without.trend)
    assert len(beside.steps) == 40
    found = {one.name for one in diagnose(of, [np.array([x]) for x in _steps(0, 13)]).causes}
    assert "drift" not in found


@pytest.mark.parametrize("factor", [0.3, 100.0])
def test_steps_beyond_every_cause_have_no_diagnosis(of, factor):
    found = diagnose(of, [factor * _steps(0)])
    assert (found.normal, found.nothing, found.causes, found.tell) == (False, None, (), {})
    says = "check the unit" if factor > 1 else "faster than 100 of 100 such runs"
    assert says in found.headline().splitlines()[-1]
    assert "nothing" not in str(found)
    assert str(found).startswith("No cause here explains a step of")


def test_steps_that_would_take_more_than_the_peak_say_so(of):
    """At 0.6 of the predicted step, a share of the peak is what it was, over 0.6."""
    found = diagnose(dataclasses.replace(of, mfu=0.68), [np.array([0.6])])
    assert found.mfu == pytest.approx(0.68 / 0.6)
    assert "113% of the peak FLOP/s" in found.headline().splitlines()[-1]
    assert not found.causes


@pytest.mark.parametrize("bad", [[np.array([])], [np.array([1.0, np.nan])], [np.zeros(3)]])
def test_measured_steps_are_positive_numbers(of, bad):
    with pytest.raises(ValueError, match="a list of positive step times"):
        diagnose(of, bad)


def test_one_rank_alone_is_not_called_slow(of):
    (first, *_) = _ranks(0)
    found = diagnose(of, ranks=[first])
    assert "rank 0 has most" not in found.headline().splitlines()[-1]


@pytest.mark.slow
def test_a_case_that_was_asked_in_public_has_causes(shared, tmp_path, answered, capsys):
    """A model of 13 billion parameters on 16 GPUs, at 156 s a step where 55 are usual."""
    job = str(tmp_path / "job.toml")
    case = str(shared / "cases" / "c11_three_times_slow.txt")
    arguments = [case, "--gpus", "16", "--cluster", "dgx-a100"]
    assert main(["import", *arguments, "--out", job]) == 0
    capsys.readouterr()
    found = answered(["diagnose", job, "--step-time", "156", "--json"])
    assert not found["normal"]
    assert found["causes"][0]["name"] == "congested-link"
    assert {"slow-rank", "input"} <= found["tell"].keys()
