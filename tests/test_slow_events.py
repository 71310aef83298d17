"""Slow events against runs of one step after the other, and closed forms."""

import jax
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.data import Cause, Failures, Slow
from prism_jax.runs import RunCosts, training_run
from prism_jax.runs._rates import slowed


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
    ours = slowed(float(num_steps), _KINDS, rates, find_s, np.random.default_rng(0))
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
        added, found = slowed(work, kinds, rates, find, np.random.default_rng(0))
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
    added, _ = slowed(1000.0, fast, np.full((50, 2), 10.0), *options)
    # Both begin at once, and never end.
    np.testing.assert_allclose(added, 2000.0, rtol=0.01)
    added, found = slowed(1000.0, fast, np.zeros((50, 2)), *options)
    assert not added.any()
    assert not found.any()
    some, _ = slowed(1000.0, fast, np.full((20_000, 2), 1e-3), *options)
    untouched = np.exp(-2.0)
    assert abs(np.mean(some == 0) - untouched) < 4 * np.sqrt(untouched * (1 - untouched) / 20_000)


def _run(slow, find_slow_s=None, **options):
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
    never, hour = _run(slow), _run(slow, 3600.0)
    assert never.finding_saves_days is None
    for law in (never, hour):
        assert sum(law.parts.values()) == pytest.approx(law.mean.value)
        assert law.parts["work"] == pytest.approx(10.0)
    saved = hour.finding_saves_days
    assert saved is not None
    assert saved.value == pytest.approx(never.mean.value - hour.mean.value)
    assert saved.value > 20 * saved.standard_error
    # Each that is found takes a checkpoint and a restart.
    found = 2 * np.exp(-0.1) * (10 + hour.parts["slow"])
    assert hour.parts["down"] == pytest.approx(found * 630 / 86_400, rel=0.02)


def test_restarts_can_cost_more_than_finding_saves():
    saved = _run((Slow("gpu", 50, 700.0, 1.01),), 60.0).finding_saves_days
    assert saved is not None
    assert saved.value < 0


def test_how_often_nodes_are_slow_is_as_uncertain_as_its_count():
    slow = (Slow("gpu", 2, 3600.0, 1.5),)
    known, counted = (_run(slow, known_rates=known) for known in (True, False))
    # Jeffreys' prior: a mean of 2.5 where two were counted; the spread of a gamma law on top.
    assert counted.parts["slow"] == pytest.approx(known.parts["slow"] * 1.25, rel=0.06)
    assert counted.days.std() > 2 * known.days.std()


@pytest.mark.parametrize("find_slow_s", [-1.0, np.inf, np.nan])
def test_finding_takes_finite_seconds(find_slow_s):
    with pytest.raises(ValueError, match="must be finite, not negative"):
        _run((Slow("gpu", 1, 10.0, 2.0),), find_slow_s)


def test_more_slow_events_than_can_be_held_are_refused():
    with pytest.raises(ValueError, match="give fewer events or steps"):
        _run((Slow("gpu", 1e6, 10.0, 2.0),))


def test_run_command_prints_the_days_saved_by_finding(capsys, tmp_path):
    words = ["run", "megatron-22b-a100-8", "--steps", "1000", "--samples", "64", "--runs", "100"]
    assert main([*words, "--find-slow", "3600"]) == 2
    error = capsys.readouterr().err
    assert "leave `find_slow_s` out" in error
    assert "Traceback" not in error
    path = tmp_path / "failures.toml"
    path.write_text(
        "kind = 'failures'\nsource = 'made'\ndevice_hours = 10\nrestart_s = 9\nblocking_s = 1\n"
        "causes = [{ name = 'gpu', count = 0 }]\n"
        "slow = [{ name = 'gpu', count = 9, duration_s = 4000, slowdown = 3 }]\n"
    )
    assert main([*words, "--failures", str(path), "--interval", "1000", "--find-slow", "60"]) == 0
    assert "saves" in capsys.readouterr().out
