"""Runs whose nodes, weeks and networks are not alike, and which slow events make longer."""

import dataclasses

import jax
import msgspec
import numpy as np
import pytest
from scipy.stats import nbinom, weibull_min

import prism_jax as prism
from prism_jax.data import Cause, Failures, Slow, UnequalNodes, UnequalWeeks, load_failures
from prism_jax.runs import RunCosts, _rates, training_run
from prism_jax.runs._cycles import _repairs, run_cycles

from .helpers import refusal


_RUNS = 20_000


def _failures(count, **options):
    """Counts in a week of 8 devices."""
    cause = Cause(name="gpu", count=count, takes_node=True, announced=True)
    return Failures(8 * 7 * 24, (cause,), 0.0, 0.0, "made", **options)


def _counts(failures, weeks, *, known_rates, devices=8):
    """The interruptions of runs that lose nothing by them, and so last as many weeks."""
    rng = np.random.default_rng(0)
    hazards = _rates.draw_hazards(failures, devices, _RUNS, rng, known_rates=known_rates)
    work = np.full(_RUNS, weeks * _rates.WEEK)
    runs = run_cycles(work, np.ones((_RUNS, 1)), hazards, RunCosts(weeks * _rates.WEEK, 0, 0), rng)
    np.testing.assert_allclose(runs.parts.sum(axis=1), work)
    return runs.interruptions[:, 0]


@pytest.mark.parametrize(
    ("options", "known_rates", "devices", "shape"),
    [
        ({"nodes": UnequalNodes(0.68, 8)}, True, 8, 0.68),
        ({"nodes": UnequalNodes(0.68, 8)}, True, 32, 4 * 0.68),
        ({"weeks": UnequalWeeks(1.87, 30)}, True, 8, 1.87),
        ({}, False, 8, 3.5),  # The posterior of Jeffreys' prior, of the mean 3.5 a week.
    ],
)
def test_a_gamma_law_of_rates_makes_counts_negative_binomial(options, known_rates, devices, shape):
    counts = _counts(_failures(3, **options), 1.0, known_rates=known_rates, devices=devices)
    mean = (3 if known_rates else 3.5) * devices / 8
    law = nbinom(shape, shape / (shape + mean))
    for count in range(12):
        error = np.sqrt(law.cdf(count) * law.sf(count) / _RUNS)
        assert abs(np.mean(counts <= count) - law.cdf(count)) < 4 * error, count


def test_causes_told_apart_fail_as_often_as_together():
    """Ten causes counted once each, or one counted ten times: the gamma law of Jeffreys' prior."""
    for counts in ([10], [1] * 10, [10, *[0] * 9]):
        causes = [Cause(name="gpu", count=count) for count in counts]
        total = _rates.draw_counts(causes, _RUNS, np.random.default_rng(0), known_rates=False).sum(
            axis=1
        )
        assert total.mean() == pytest.approx(10.5, abs=4 * np.sqrt(10.5 / _RUNS))
        assert total.var() == pytest.approx(10.5, rel=0.05)


def test_a_part_of_a_node_fails_like_the_node():
    failures = _failures(3, nodes=UnequalNodes(0.68, 8))
    rates = [
        _rates.draw_hazards(failures, devices, 4, np.random.default_rng(0), known_rates=True).rates
        for devices in (1, 8)
    ]
    np.testing.assert_allclose(8 * rates[0], rates[1])


def test_weeks_of_which_nothing_is_known_are_refused():
    failures = _failures(3, weeks=UnequalWeeks(0.3, 1))
    refusal(
        lambda: _rates.check_failures(failures, True, None), "nothing is known of an average week"
    )


def _near(values, wanted):
    return abs(values.mean() - wanted) < 4 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("shape", [0.3, 1.87, 50.0])
def test_each_week_has_a_factor_of_its_own_and_a_week_in_parts_keeps_it(shape):
    failures, weeks = _failures(3, weeks=UnequalWeeks(shape, 1e9)), np.array([1, 1, 0.5])
    counts = _counts(failures, weeks.sum(), known_rates=True)
    mean = 3 * weeks.sum()
    assert _near(counts, mean)
    # Of a gamma factor of each week, on as many interruptions as its part has.
    assert _near((counts - mean) ** 2, mean + ((3 * weeks) ** 2).sum() / shape)


def test_counts_of_few_weeks_say_less_of_an_average_week():
    """The inverse of a gamma factor of mean one and shape `a` has the mean `a / (a - 1)`."""
    shape = 1.87 * 20
    few = _failures(1e6, weeks=UnequalWeeks(1.87, 20))
    hazards = _rates.draw_hazards(few, 8, _RUNS, np.random.default_rng(0))
    rates = hazards.rates[:, 0] * _rates.WEEK / 1e6
    assert _near(rates, shape / (shape - 1))
    assert _near(rates**2, shape**2 / (shape - 1) / (shape - 2))


def test_weighted_seconds_grow_by_the_factor_of_the_week():
    rng = np.random.default_rng(0)
    factors = np.exp(3 * rng.normal(size=(500, 4)))
    weeks = np.pad(np.cumsum(_rates.WEEK * factors, axis=1), ((0, 0), (1, 0)))
    at = 1e8 * rng.random(500)  # Up to 41 times all weeks.
    whole = at // _rates.WEEK
    later = at + rng.random(500) * ((whole + 1) * _rates.WEEK - at)
    found = _rates.exposed(later, weeks) - _rates.exposed(at, weeks)
    wanted = factors[np.arange(500), whole.astype(int) % 4] * (later - at)
    np.testing.assert_allclose(found, wanted, atol=1e-12 * _rates.exposed(later, weeks).max())
    np.testing.assert_allclose(_rates.reached(_rates.exposed(at, weeks), weeks), at)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.27])
def test_repairs_have_the_law_of_weibull_and_the_mean_that_was_asked_for(power):
    costs = RunCosts(100.0, 0.0, 0.0, repair_s=1000.0, repair_power=power)
    repairs = _repairs(_RUNS, costs, np.random.default_rng(0))
    assert _near(repairs, 1000.0)
    law = weibull_min(1 / power)
    law = weibull_min(1 / power, scale=1000.0 / law.mean())
    for q in (0.1, 0.5, 0.9):
        assert abs(np.mean(repairs <= law.ppf(q)) - q) < 4 * np.sqrt(q * (1 - q) / _RUNS)


def _step():
    return prism.compile_graph([prism.Op(1.0)])


def test_derivatives_in_rates_are_differences_where_weeks_differ():
    """By how much more of a cause lengthens runs, some of which meet a bad week."""
    made = {"device_hours": 24 * 7, "restart_s": 9000.0, "blocking_s": 60.0, "source": "made"}
    options = {"key": jax.random.key(0), "num_steps": int(1.5 * _rates.WEEK), "num_runs": 8_000}

    def law(scale, **more):
        cause = Cause(name="gpu", count=20 * scale)
        failures = Failures(causes=(cause,), weeks=UnequalWeeks(1.0, 1e9), **made)
        return training_run(_step(), failures=failures, known_rates=True, **options, **more)

    costs = RunCosts(20_000.0, 60.0, 9000.0)
    found = law(1, derivatives=True, costs=costs).derivatives["rate of gpu"]
    more, less = (law(np.exp(apart), costs=costs).mean for apart in (0.2, -0.2))
    difference = (more.value - less.value) / 0.4
    error = np.hypot(more.standard_error, less.standard_error) / 0.4
    assert abs(found.value - difference) < 4 * np.hypot(error, found.standard_error)
    assert found.value > 10 * found.standard_error


def test_spares_that_a_run_of_high_rates_cannot_live_with_are_refused_at_once():
    """One interruption is counted, but some runs draw a rate ten times as high."""
    failures = _failures(1, repair_s=2 * _rates.WEEK, repair_power=2.0)
    failures = msgspec.structs.replace(failures, device_hours=7 * 24, blocking_s=1.0)
    options = {"failures": failures, "num_steps": int(20 * _rates.WEEK), "key": jax.random.key(0)}
    options |= {"num_spares": 3, "num_runs": 20_000}
    refusal(lambda: training_run(_step(), **options), "more spares or shorter repairs")
    law = training_run(_step(), known_rates=True, **options)
    assert law.parts["waiting"] > 0
    assert law.days[-1] < 10 * 20 * 7


def test_rates_at_which_a_run_would_not_end_are_refused_at_once():
    """At the rate that was counted, a week without interruption comes in no time."""
    made = {"device_hours": 7 * 24, "restart_s": _rates.WEEK, "blocking_s": 1.0, "source": "made"}
    failures = Failures(causes=(Cause(name="software", count=1),), **made)
    options = {"failures": failures, "num_steps": int(4 * _rates.WEEK), "key": jax.random.key(0)}
    options |= {"costs": RunCosts(_rates.WEEK, 1.0, _rates.WEEK), "num_runs": 20_000}
    refusal(lambda: training_run(_step(), **options), "save checkpoints more often")
    assert training_run(_step(), known_rates=True, **options).parts["lost"] > 0


def test_the_costs_of_a_run_are_those_of_its_failures():
    """Without a spare, a run waits for each repair: longer than without waiting."""
    failures = load_failures("infinitehbd")
    options = {"num_steps": 10**6, "key": jax.random.key(0), "num_runs": 2000, "num_spares": 0}
    few = {"device_hours": failures.device_hours / 20, "nodes": None}  # One device fails as 20.
    failures = msgspec.structs.replace(failures, **few)
    law = training_run(_step(), failures=failures, **options)
    costs = RunCosts(law.interval_s, 30.0, 600.0, repair_s=661_000.0, repair_power=2.27)
    same = training_run(_step(), failures=failures, costs=costs, **options)
    np.testing.assert_array_equal(law.days, same.days)
    dry = dataclasses.replace(costs, repair_s=0.0)
    short = training_run(_step(), failures=failures, costs=dry, **options)
    assert short.mean.value < law.mean.value


def test_shipped_faults_are_those_of_the_source_and_predict_those_of_later_days(shared):
    from validation.faults import fault_rows, faults, fitted

    folder = shared / "data" / "faults"
    shipped, found = load_failures("infinitehbd"), fitted(faults(folder), 0, 232)
    assert sum(cause.count for cause in shipped.causes) == found.causes[0].count
    for name in ("device_hours", "repair_s", "repair_power"):
        assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=0.005), name
    for ours, theirs in ((shipped.nodes, found.nodes), (shipped.weeks, found.weeks)):
        wanted = msgspec.to_builtins(theirs)
        assert msgspec.to_builtins(ours) == pytest.approx(wanted, rel=0.005)
    total, weeks_alike, *others = fault_rows(folder)
    assert total["low"] < total["happened"] < total["high"]
    assert weeks_alike["happened"] < weeks_alike["low"]
    for row in others[-4:]:  # Quantiles of repairs, over two orders of magnitude.
        assert abs(np.log(row["predicted"] / row["happened"])) < np.log(1.5)


_KINDS = (Slow("gpu", 1, 200.0, 1.5), Slow("network", 1, 400.0, 3.0))
_RATES = np.array([1e-3, 5e-4])


def _by_steps(rng, num_steps, find_s):
    """One run of steps of a second: by how much it is longer, and how many events it finds."""
    events, clock = [], 0.0
    for kind, rate in zip(_KINDS, _RATES, strict=True):
        begin = rng.exponential(1 / rate)
        while begin < 3 * num_steps:
            lasts = rng.exponential(kind.duration_s)
            events.append((begin, begin + min(lasts, find_s), kind.slowdown, lasts > find_s))
            begin += rng.exponential(1 / rate)
    for _ in range(num_steps):
        clock += max((by for begin, end, by, _ in events if begin <= clock < end), default=1.0)
    return clock - num_steps, sum(found and end < clock for _, end, _, found in events)


@pytest.mark.parametrize("find_s", [np.inf, 300.0])
def test_slow_events_are_those_of_one_step_after_the_other(find_s):
    number, num_steps = 300, 4000
    rates = np.broadcast_to(_RATES, (20_000, 2))
    ours = _rates.slowed(float(num_steps), _KINDS, rates, find_s, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    theirs = np.array([_by_steps(rng, num_steps, find_s) for _ in range(number)]).T
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a.mean() - b.mean()) <= 4 * b.std() / np.sqrt(number)
        for level in (0.1, 0.25, 0.5, 0.75, 0.9):
            # Strictly below and up to a quantile, for counts have ties.
            at = np.quantile(a, level)
            error = 4 * np.sqrt(level * (1 - level) / number)
            assert np.mean(b < at) - error < level < np.mean(b <= at) + error


def test_a_long_run_is_slow_for_the_share_of_time_with_an_event():
    """Events that last exponential times until they are found: the queue M/G/infinity is busy."""
    mean, rate, find_s, work = 300.0, 2e-3, 400.0, 2e5
    kinds, rates = (Slow("network", 1, mean, 2.0),), np.full((2000, 1), rate)
    for find in (find_s, np.inf):
        busy = 1 - np.exp(-rate * mean * -np.expm1(-find / mean))
        added, found = _rates.slowed(work, kinds, rates, find, np.random.default_rng(0))
        # A second of which the share `busy` is slow does `1 - busy / 2` seconds of work.
        wanted = work / (1 - busy / 2) - work
        assert abs(added.mean() - wanted) < 4 * added.std() / np.sqrt(2000) + 2 * mean
        found_rate = rate * np.exp(-find / mean) if find < np.inf else 0.0
        # Those of the last `find` seconds are not found yet.
        events = found_rate * (work + wanted - min(find, work))
        assert abs(found.mean() - events) <= 4 * np.sqrt(events / 2000)


def test_of_two_events_at_once_the_slower_counts_and_without_events_nothing_does():
    fast = (Slow("a", 1, 1e9, 2.0), Slow("b", 1, 1e9, 3.0))
    options = (np.inf, np.random.default_rng(0))
    added, _ = _rates.slowed(1000.0, fast, np.full((50, 2), 10.0), *options)
    # Both begin at once, and never end.
    np.testing.assert_allclose(added, 2000.0, rtol=0.01)
    added, found = _rates.slowed(1000.0, fast, np.zeros((50, 2)), *options)
    assert not added.any()
    assert not found.any()
    some, _ = _rates.slowed(1000.0, fast, np.full((20_000, 2), 1e-3), *options)
    untouched = np.exp(-2.0)
    assert abs(np.mean(some == 0) - untouched) < 4 * np.sqrt(untouched * (1 - untouched) / 20_000)


def _slow_run(slow, find_slow_s=None, **options):
    """Runs of ten days that are never interrupted."""
    failures = Failures(24.0, (Cause("gpu", 0),), 600.0, 30.0, "made", slow=slow)
    options = {"key": jax.random.key(0), "num_runs": 2000, "known_rates": True} | options
    program = prism.compile_graph([prism.Op(1.0)])
    costs = RunCosts(36_000.0, 30.0, 600.0)
    return training_run(
        program,
        num_steps=864_000,
        failures=failures,
        costs=costs,
        find_slow_s=find_slow_s,
        **options,
    )


def test_finding_saves_the_time_of_slow_events_minus_restarts():
    """Two events a day, of ten hours on average, make steps twice as long."""
    slow = (Slow("gpu", 2, 36_000.0, 2.0),)
    never, hour = _slow_run(slow), _slow_run(slow, 3600.0)
    assert never.finding_saves_days is None
    for law in (never, hour):
        assert sum(law.parts.values()) == pytest.approx(law.mean.value)
        assert law.parts["work"] == pytest.approx(10.0)
    saved = hour.finding_saves_days
    assert saved.value == pytest.approx(never.mean.value - hour.mean.value)
    assert saved.value > 20 * saved.standard_error
    # Each that is found takes a checkpoint and a restart.
    found = 2 * np.exp(-0.1) * (10 + hour.parts["slow"])
    assert hour.parts["down"] == pytest.approx(found * 630 / 86_400, rel=0.02)


def test_restarts_can_cost_more_than_finding_saves():
    saved = _slow_run((Slow("gpu", 50, 700.0, 1.01),), 60.0).finding_saves_days
    assert saved.value < 0


def test_how_often_nodes_are_slow_is_as_uncertain_as_its_count():
    slow = (Slow("gpu", 2, 3600.0, 1.5),)
    known, counted = (_slow_run(slow, known_rates=known) for known in (True, False))
    # Jeffreys' prior: a mean of 2.5 where two were counted; the spread of a gamma law on top.
    assert counted.parts["slow"] == pytest.approx(known.parts["slow"] * 1.25, rel=0.06)
    assert counted.days.std() > 2 * known.days.std()


@pytest.mark.parametrize("find_slow_s", [-1.0, np.inf, np.nan])
def test_finding_takes_finite_seconds(find_slow_s):
    with pytest.raises(ValueError, match="must be finite, not negative"):
        _slow_run((Slow("gpu", 1, 10.0, 2.0),), find_slow_s)


def test_more_slow_events_than_can_be_held_are_refused():
    refusal(lambda: _slow_run((Slow("gpu", 1e6, 10.0, 2.0),)), "give fewer events or steps")


def test_run_command_prints_the_days_saved_by_finding(answered, refused, written):
    words = ["run", "megatron-22b-a100-8", "--steps", "1000", "--samples", "64", "--runs", "100"]
    error = refused([*words, "--find-slow", "3600"])
    assert "leave `find_slow_s` out" in error
    assert "Traceback" not in error
    path = written(
        "failures.toml",
        "kind = 'failures'\nsource = 'made'\ndevice_hours = 10\nrestart_s = 9\nblocking_s = 1\n"
        "causes = [{ name = 'gpu', count = 0 }]\n"
        "slow = [{ name = 'gpu', count = 9, duration_s = 4000, slowdown = 3 }]\n",
    )
    assert "saves" in answered(
        [*words, "--failures", str(path), "--interval", "1000", "--find-slow", "60"]
    )
