import dataclasses
import random

import jax
import numpy as np
import pytest
from scipy.special import gamma, ndtr
from scipy.stats import poisson

import prism_jax as prism
from prism_jax.data import Cause, Failures, load_failures
from prism_jax.prediction import levels_of_law
from prism_jax.runs import RunCosts, best_interval, training_run
from prism_jax.runs._cycles import PARTS, run_cycles
from prism_jax.runs._rates import WEEK, Hazards
from prism_jax.runs._run_law import expected_seconds, waiting_share

from .helpers import refusal
from .runs_by_events import run_by_events


HOUR = 3600.0


def hazards(rates, number, *, down=None, spares=None, announced=None, takes=(False,)):
    kinds = len(rates)
    none = np.zeros(kinds, bool)
    return Hazards(
        np.broadcast_to(np.asarray(rates, float), (number, kinds)),
        np.zeros(kinds) if down is None else np.asarray(down, float),
        none | np.asarray(takes),
        none,
        none if announced is None else np.asarray(announced),
        spares,
    )


def run(costs, what, number, *, hours=100.0, seed=0):
    work = np.full(number, hours * HOUR)
    return run_cycles(work, np.ones((number, 1)), what, costs, np.random.default_rng(seed))


def steps(std):
    law = prism.latency.LogNormal(np.exp(-(std**2) / 2), std)  # Its mean is one.
    return prism.compile_graph([prism.Op(law)])


@pytest.mark.parametrize("rates", [(2e-4,), (1e-4, 5e-5, 2e-4)])
def test_the_mean_is_dalys(rates):
    costs = RunCosts(interval_s=1800, blocking_s=60, restart_s=300)
    extra = 900.0 * np.arange(len(rates))
    found = run(costs, hazards(rates, 20_000, down=extra), 20_000)
    seconds = found.parts.sum(axis=1)
    downs = list(zip(rates, (300 + extra).tolist(), strict=True))
    # All intervals but the last save a checkpoint, which costs no more than itself done again.
    whole = expected_seconds(100 * HOUR, 1800, 60, downs)
    last = expected_seconds(1800, 1800, 60, downs) - expected_seconds(1800, 1800, 0, downs)
    error = seconds.std() / np.sqrt(len(seconds))
    assert abs(seconds.mean() - (whole - last)) < 4 * error


def test_parts_add_up_to_a_run_and_all_its_work_is_done():
    costs = RunCosts(1800, 60, 300, background_s=120, repair_s=9000, evaluation_s=30)
    what = hazards((2e-4, 1e-4), 500, spares=1, takes=[True], announced=[False, True])
    found = run(costs, what, 500)
    work, evaluation = (found.parts[:, PARTS.index(name)] for name in ("work", "evaluation"))
    np.testing.assert_allclose(work, 100 * HOUR, rtol=1e-9)
    np.testing.assert_allclose(evaluation, work * 30 / 1800, rtol=1e-9)
    assert np.all(found.parts >= -1e-6)
    assert np.all(found.parts[:, PARTS.index("waiting")].mean() > 0)
    # An interruption comes at its rate, whatever the run does.
    expected = 1e-4 * found.parts.sum()
    assert abs(found.interruptions[:, 1].sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.parametrize("background", [0, 900, 2500])
def test_announced_interruptions_lose_no_work(background):
    costs = RunCosts(1800, 0, 300, background_s=background)
    found = run(costs, hazards((2e-4,), 300, announced=[True]), 300)
    parts = dict(zip(PARTS, found.parts.T, strict=True))
    # Whatever is not a restart is work that counts.
    np.testing.assert_array_equal(parts["lost"], 0)
    np.testing.assert_allclose(parts["checkpoint"], 0, atol=1e-6)
    np.testing.assert_allclose(parts["work"], 100 * HOUR)


def test_without_spares_a_run_waits_for_every_repair_and_with_many_for_none():
    costs = RunCosts(1800, 60, 300, repair_s=900)
    none, many, always = (
        run(costs, hazards((2e-4,), 2000, spares=spares, takes=[True]), 2000)
        for spares in (0, 40, None)
    )
    longer = RunCosts(1800, 60, 1200)
    as_long = run(longer, hazards((2e-4,), 2000), 2000)
    np.testing.assert_allclose(none.parts.sum(axis=1), as_long.parts.sum(axis=1))
    np.testing.assert_allclose(many.parts, always.parts)


def _waits(spares, number=1000, power=0.0):
    """Long runs with two nodes in repair on average; half of the interruptions take none."""
    costs = RunCosts(1800, 60, 300, repair_s=20_000, repair_power=power)
    what = hazards((1e-4, 1e-4), number, spares=spares, takes=[True, False])
    return run(costs, what, number, hours=500)


@pytest.mark.parametrize(("spares", "power"), [(0, 0), (2, 0), (5, 0), (2, 1), (5, 2.27)])
def test_a_run_waits_while_more_nodes_are_in_repair_than_there_are_spares(spares, power):
    """Of repairs, only the mean counts in the end: so it is for the queue M/G/infinity."""
    parts = _waits(spares, power=power).parts
    seconds, waiting = parts.sum(axis=1), parts[:, PARTS.index("waiting")]
    share = waiting_share(1e-4, 20_000, spares)
    # A run begins without a node in repair. What is missing from the mean number in repair adds up
    # to half of the rate times the mean square of repairs, and each that is missing waits less.
    error = (waiting - share * seconds).std() / np.sqrt(len(seconds)) / seconds.mean()
    square = 20_000**2 * gamma(1 + 2 * power) / gamma(1 + power) ** 2
    start = 1e-4 * square / 2 * poisson.pmf(spares, min(spares, 2)) / seconds.mean()
    assert abs(waiting.mean() / seconds.mean() - share) < 4 * error + start


@pytest.mark.parametrize("spares", [0, 2])
def test_waiting_changes_nothing_of_a_run_but_its_length(spares):
    few, always = _waits(spares).parts, _waits(None).parts
    for name in ("lost", "down"):
        a, b = (parts[:, PARTS.index(name)] for parts in (few, always))
        error = np.hypot(a.std(), b.std()) / np.sqrt(len(a))
        assert abs(a.mean() - b.mean()) < 4 * error, name


# A run on few GPUs that fail often: by cause, whether it takes a node or is announced.
_OFTEN = (
    Cause(name="gpu", count=60, takes_node=True),
    Cause(name="host", count=30, takes_node=True, detection_s=400.0),
    Cause(name="software", count=50, detection_s=100.0),
    Cause(name="planned", count=40, announced=True),
)


@pytest.mark.parametrize(
    ("spares", "background", "power", "week_shape"),
    [
        (0, 0.0, 0.0, None),
        (1, 0.0, 0.0, None),
        (3, 0.0, 0.0, None),
        (None, 900.0, 0.0, None),
        (2, 1500.0, 0.0, None),
        (0, 0.0, 2.27, None),
        (3, 0.0, 2.27, None),
        (None, 0.0, 0.0, 1.87),
        (2, 0.0, 1.0, 1.87),
    ],
)
def test_runs_are_those_of_one_event_after_the_other(spares, background, power, week_shape):
    costs = RunCosts(1000.0, 60.0, 300.0, background, 7000.0, 50.0, power)
    rates = [cause.count * 2e-6 for cause in _OFTEN]
    number, hours = 2000, 10
    if week_shape:  # The same, a hundred times as slow: of about eight weeks.
        seconds = {n: 100 * x for n, x in vars(costs).items() if n != "repair_power"}
        costs, hours = dataclasses.replace(costs, **seconds), 1000
        rates = [rate / 100 for rate in rates]
    down, takes, announced = (
        [getattr(cause, name) for cause in _OFTEN]
        for name in ("detection_s", "takes_node", "announced")
    )
    what = hazards(rates, number, down=down, spares=spares, announced=announced, takes=takes)
    if week_shape:
        factors = np.random.default_rng(2).gamma(week_shape, 1 / week_shape, (number, 52))
        weeks = np.pad(np.cumsum(WEEK * factors, axis=1), ((0, 0), (1, 0)))
        what = dataclasses.replace(what, weeks=weeks)
    found = run(costs, what, number, hours=hours)
    rng = random.Random(1)
    events = [
        run_by_events(rng, hours * HOUR, _OFTEN, rates, costs, spares, week_shape or np.inf)
        for _ in range(number)
    ]
    seconds, waited = np.array(events).T
    for ours, theirs in (
        (found.parts.sum(axis=1), seconds),
        (found.parts[:, PARTS.index("waiting")], waited),
    ):
        error = np.hypot(ours.std(), theirs.std()) / np.sqrt(number)
        assert abs(ours.mean() - theirs.mean()) <= 4 * error
        # Two samples of one law: the distance of Kolmogorov and Smirnov, at one in 10,000.
        grid = np.sort(np.concatenate([ours, theirs]))
        below = (np.searchsorted(np.sort(runs), grid, side="right") for runs in (ours, theirs))
        distance = np.abs(np.subtract(*below)).max() / number
        assert distance < 2.23 * np.sqrt(2 / number)


def test_the_mean_run_counts_announced_interruptions():
    costs = RunCosts(interval_s=1800, blocking_s=60, restart_s=300)
    found = run(costs, hazards((1e-4, 1e-4), 500, announced=[False, True]), 500, hours=1000)
    seconds = found.parts.sum(axis=1)
    whole = expected_seconds(1000 * HOUR, 1800, 60, [(2e-4, 300)], announced=1e-4)
    assert abs(seconds.mean() - whole) < 4 * seconds.std() / np.sqrt(len(seconds)) + 1800


@pytest.mark.parametrize(
    ("blocking", "announced"), [(0.01, 0.0), (30.0, 0.0), (3000.0, 0.0), (30.0, 1e-5)]
)
def test_no_interval_is_better_than_the_best(blocking, announced):
    rate = 1e-4
    best = best_interval(rate - announced, blocking)
    at, less, more = (
        expected_seconds(1e7, best * by, blocking, [(rate, 600.0)], announced)
        for by in (1, 0.97, 1.03)
    )
    assert at <= less
    assert at <= more
    if blocking < 1:
        assert best == pytest.approx(np.sqrt(2 * blocking / rate), rel=0.01)
    assert best_interval(5e-5, 1e-12) == pytest.approx(np.sqrt(2e-12 / 5e-5))


_NEVER = Cause(name="gpu", count=0)


def _training_run(*causes, std=1e-3, num_steps=100_000, costs=None, **options):
    """A run on a device that these causes interrupt so often in 1,000 hours."""
    restart, blocking = (300.0, 60.0) if costs is None else (costs.restart_s, costs.blocking_s)
    failures = Failures(1000.0, causes, restart, blocking, "made")
    options = {"key": jax.random.key(0), "num_runs": 100} | options
    return training_run(steps(std), num_steps=num_steps, failures=failures, costs=costs, **options)


def test_a_run_that_loses_no_work_saves_no_checkpoint_between():
    law = _training_run(Cause(name="planned", count=500, announced=True))
    assert law.best_interval_s == np.inf
    assert law.parts["checkpoint"] == 0


def test_repairs_longer_than_the_run_are_refused_only_if_it_may_wait_for_them():
    cause = Cause(name="gpu", count=36, takes_node=True)  # One in the run.
    costs = RunCosts(3600.0, 60.0, 300.0, repair_s=3e6)
    law = _training_run(cause, costs=costs, num_spares=20)
    assert law.parts["waiting"] == 0
    with pytest.raises(ValueError, match="more spares or shorter repairs"):
        _training_run(cause, costs=costs, num_spares=3)


def _step_by_step(rng, num_steps, rate, costs, step, spread):
    """One run, one step after the other."""
    clock, safe, done = 0.0, 0, 0
    every = round(costs.interval_s / step)
    until = rng.exponential(1 / rate)
    while done < num_steps:
        latency = step * (1 + spread * rng.normal())
        saves = (done + 1) % every == 0 and done + 1 < num_steps
        latency += costs.blocking_s * saves
        if clock + latency < until:
            clock, done = clock + latency, done + 1
            safe = done if saves else safe
            continue
        clock, done = until, safe
        while True:  # Restarts may be interrupted.
            until = clock + rng.exponential(1 / rate)
            if until > clock + costs.restart_s:
                clock += costs.restart_s
                break
            clock = until
    return clock


def test_short_runs_are_those_of_one_step_after_the_other():
    costs = RunCosts(interval_s=100.0, blocking_s=5.0, restart_s=40.0)
    number, rate = 2000, 1 / 300.0
    cause = Cause(name="gpu", count=rate * HOUR * 1000.0)
    sizes = {"num_steps": 550, "num_runs": 40_000, "num_samples": 2**18}
    law = _training_run(cause, std=0.05, costs=costs, known_rates=True, **sizes)
    rng = np.random.default_rng(1)
    slow = np.array([_step_by_step(rng, 550, rate, costs, 1.0, 0.05) for _ in range(number)])
    days = slow / 86_400
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        within = np.mean(days <= law.quantile(level))
        assert abs(within - level) < 4 * np.sqrt(level * (1 - level) / number)
    assert abs(law.mean.value - days.mean()) < 4 * days.std() / np.sqrt(number)
    chance = law.probability(float(np.median(days)))
    assert abs(chance.value - 0.5) < 4 * np.sqrt(0.25 / number)


def test_steps_that_are_like_those_before_spread_a_run_as_fewer_would():
    sizes = {"std": 0.05, "num_steps": 10_000, "num_runs": 20_000, "known_rates": True}
    for time in (1.0, 25.0):
        law = _training_run(_NEVER, autocorrelation_time=time, **sizes)
        alike = 0.05 * np.sqrt(10_000 * time) / 86_400
        assert law.days.std() == pytest.approx(alike, rel=0.04)
    for days in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="must be positive"):
            law.probability(days)


def test_the_error_of_a_deadline_is_that_of_steps_and_of_runs():
    """Without interruptions a run is a sum of steps, whose law is known. The intervals of 12 keys
    hold it, though the mean of 256 steps is known less well than runs differ; and so do those of
    the law with levels, which the command line prints.
    """
    num_steps, num_keys = 1000, 12
    sizes = {"std": 0.05, "num_steps": num_steps, "num_samples": 256, "num_runs": 500}
    std, levels = 0.05 * np.sqrt(num_steps), np.array([0.99, 1.0, 1.01])
    days = (num_steps + 0.5 * std) / 86_400
    truth = ndtr(0.5), np.mean(ndtr((num_steps * (2 - levels) + 0.5 * std - num_steps) / std))
    held, mean = np.zeros(2), 0
    for seed in range(num_keys):
        law = _training_run(_NEVER, known_rates=True, key=jax.random.key(seed), **sizes)
        both = [one.probability(days).interval() for one in (law, law.at_levels(levels))]
        held += [low < one < high for one, (low, high) in zip(truth, both, strict=True)]
        mean += law.mean.interval()[0] < num_steps / 86_400 < law.mean.interval()[1]
    assert np.all(held >= 0.85 * num_keys)
    assert mean >= 0.85 * num_keys


def test_derivatives_are_those_of_dalys_formula():
    costs = RunCosts(interval_s=3600.0, blocking_s=120.0, restart_s=900.0)
    causes = Cause(name="a", count=200), Cause(name="b", count=50, detection_s=600.0)
    sizes = {"num_steps": 360_000, "num_runs": 20_000, "key": jax.random.key(2)}
    law = _training_run(*causes, costs=costs, known_rates=True, derivatives=True, **sizes)

    def mean(scale):
        a, b = (count * scale.get(name, 1) / 3.6e6 for name, count in (("a", 200), ("b", 50)))
        restart = 900 * scale.get("restart_s", 1)
        interval, blocking = 3600 * scale.get("interval_s", 1), 120 * scale.get("blocking_s", 1)
        downs = [(a, restart), (b, restart + 600)]
        return expected_seconds(360_000.0, interval, blocking, downs) / 86_400

    for key in ("a", "b", "restart_s", "blocking_s", "interval_s"):
        name = f"rate of {key}" if key in "ab" else key
        wanted = (mean({key: np.exp(0.1)}) - mean({key: np.exp(-0.1)})) / 0.2
        found = law.derivatives[name]
        # The last interval saves no checkpoint: one part in a hundred of what checkpoints cost.
        slack = 0.01 * abs(wanted) + 0.003 * mean({}) * (key == "interval_s")
        assert abs(found.value - wanted) < 4 * found.standard_error + slack, name


def test_llama_3_was_interrupted_as_often_and_as_effective():
    failures = load_failures("llama-3")
    rates = [cause.count / (failures.device_hours * HOUR) * 16_384 for cause in failures.causes]
    assert sum(cause.count for cause in failures.causes) == 466
    announced = [cause.announced for cause in failures.causes]
    interval = best_interval(sum(rates), failures.blocking_s)
    costs = RunCosts(interval, failures.blocking_s, failures.restart_s)
    found = run(costs, hazards(rates, 1000, announced=announced), 1000, hours=54 * 24 * 0.88)
    days = found.parts.sum(axis=1) / 86_400
    interruptions = found.interruptions.sum(axis=1) * 54 / days
    assert abs(interruptions.mean() - 466) < np.sqrt(466)
    # What the job was up: "higher than 90 % effective training time" leaves out checkpoints.
    up = 1 - found.parts[:, PARTS.index("down")] / found.parts.sum(axis=1)
    assert up.mean() > 0.9
    assert 50 < days.mean() < 58


def test_slow_sets_of_gpus_make_slow_runs_unless_they_are_replaced():
    what = hazards((2e-4,), 4000)
    costs = RunCosts(1800, 60, 300)
    slowness = np.where(np.random.default_rng(0).random((4000, 32)) < 0.5, 0.98, 1.02)
    work = np.full(4000, 100 * HOUR)

    def spread(reallocates):
        one = dataclasses.replace(what, reallocates=np.array([reallocates]))
        runs = run_cycles(work, slowness, one, costs, np.random.default_rng(1))
        return runs.parts[:, PARTS.index("work")].std()

    assert spread(False) == pytest.approx(0.02 * 100 * HOUR, rel=0.02)
    assert spread(True) < 0.4 * spread(False)


@pytest.mark.parametrize("words", [("--interval", "10", "--blocking", "600"), ("--interval", "0")])
def test_checkpoints_that_take_too_long_are_refused_before_steps_are_simulated(
    words, refused, monkeypatch
):
    job = ["run", "megatron-22b-a100-8", "--steps", "100000", *words]
    error = refused(job)
    assert "longer interval" in error
    assert "compiling" not in error
    # Nor does the function simulate.
    monkeypatch.setattr("prism_jax.runs._training_run.simulate", None)
    program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
    options = {"num_steps": 100, "key": jax.random.key(0), "costs": RunCosts(10, 600, 300)}
    refusal(lambda: prism.training_run(program, **options), "longer interval")


def test_the_command_prints_the_law_of_a_run(answered):
    """That of Python, at the levels that the job's error and runs have."""
    words = ["megatron-22b-a100-8", "--samples", "256", "--runs", "500", "--deadline", "20"]
    found = answered(["run", *words, "--steps", "1000000", "--json"])
    assert found["days"]["p5"] < found["days"]["p50"] < found["days"]["p95"]
    low, high = found["probability_interval_95"]
    assert 0 <= low <= found["probability"] <= high <= 1
    assert 0.9 < found["goodput"] < 1
    job = prism.load_job("megatron-22b-a100-8")
    level, drift = prism.calibration.level_of_runs(job)
    options = {
        "num_steps": 1_000_000,
        "num_samples": 256,
        "num_runs": 500,
        "key": jax.random.key(0),
    }
    law = prism.training_run(prism.compile_job(job), level=level, drift=drift, **options)
    levels = levels_of_law(prism.expected_error(job), (np.arange(51) + 0.5) / 51)
    chance = law.at_levels(levels).probability(20.0)
    assert found["probability"] == chance.value
    assert (low, high) == pytest.approx(np.clip(chance.interval(), 0, 1))
    assert found["days"]["mean"] == law.mean.value
    # Of fewer steps than tell the error of their mean, none is known.
    few = ["megatron-22b-a100-8", "--samples", "8", "--runs", "100", "--deadline", "20", "--json"]
    found = answered(["run", *few, "--steps", "1000"])
    assert (found["probability"], found["probability_interval_95"]) == (1, [None, None])


def test_ctrl_c_leaves_the_law_of_the_runs_so_far(monkeypatch, ctrl_c):
    from prism_jax.runs import _training_run

    def cycles(*arguments):
        ctrl_c()
        return run_cycles(*arguments)

    program, options = steps(1e-3), {"num_steps": 10_000, "key": jax.random.key(0)}
    whole = training_run(program, num_runs=4096, **options)
    monkeypatch.setattr(_training_run, "run_cycles", cycles)
    part = training_run(program, num_runs=20_000, derivatives=True, **options)
    assert part.interrupted
    assert not whole.interrupted
    assert part.requested == 20_000
    assert not part.derivatives
    np.testing.assert_array_equal(part.days, whole.days)


def test_tokens_give_the_steps_and_a_price_the_cost(answered, refused):
    job = prism.load_job("megatron-22b-a100-8")
    words = ["run", "megatron-22b-a100-8", "--samples", "64", "--runs", "100", "--json"]
    tokens = 1000 * job.tokens_per_step - 1  # The last step counts whole.
    found = answered([*words, "--tokens", str(tokens), "--price", "2.5"])
    assert found["steps"] == 1000
    assert found["gpu_hours"] == pytest.approx(8 * 24 * found["days"]["mean"])
    assert found["cost"] == 2.5 * found["gpu_hours"]
    for both in ([], ["--tokens", "1e9", "--steps", "5"]):
        assert "give one of them" in refused([*words, *both])
