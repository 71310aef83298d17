"""Stalls in traces: their laws cost as much as they did, on however many workers they were."""

import jax
import numpy as np
import pytest

from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.engine import simulate
from prism_jax.profile import compile_profile, fit_profile
from prism_jax.trace import outline

from .test_trace import _made_trace


_STALL = 3.0


def _plain(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.0
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)
    return mean * np.exp(0.02 * rng.standard_normal())


def _made(dp, pp, stalls, sleep=0.0):
    """A trace of 100 steps, in which forwards of microbatch 1 stall: `stalls` are pairs of a step
    and a worker. Worker 1 sleeps in each forward.
    """
    calls = dict.fromkeys(range(dp * pp), -1)

    def latency(kind, worker, call, rng):
        if kind != "forward-compute":
            return _plain(kind, worker, call, rng)
        calls[worker] += call == 1
        stalled = call == 1 and (calls[worker], worker) in stalls
        return _plain(kind, worker, call, rng) + sleep * (worker == 1) + _STALL * stalled

    job = Job(Layout(dp=dp, pp=pp), ScheduleConfig("1f1b", 4, blocking=False), name="made")
    return _made_trace(job, 100, latency)


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (8, 1), (2, 2)])
def test_one_stall_of_one_worker_is_not_one_of_each(dp, pp):
    """A stall in one of 100 steps, on one worker: it makes steps longer by a hundredth of itself,
    not by that times the workers.
    """
    trace = _made(dp, pp, {(50, dp * pp - 1)})
    times = trace.step_times()
    assert times.max() - np.median(times) == pytest.approx(_STALL, rel=0.05)
    profile = fit_profile(trace)
    assert [v.kernel for v in profile.variability if v.component == "stall"] == ["forward-compute"]
    law = simulate(
        compile_profile(profile), num_samples=20_000, key=jax.random.key(0), sampling="plain"
    )
    more = (law.mean - law.quantile(0.5)) / (times.mean() - np.median(times))
    # The prior of the rate and of the size, and what steps spread by besides.
    assert 0.7 < more < 2.0


def test_a_worker_that_is_nearly_always_the_last_waits_as_well():
    """Replica 0 is slow. It waits for the other in the two steps where that has a stall, for as
    long as the stall is longer than what replica 0 is slower by.
    """

    trace = _made(2, 2, {(50, 2), (60, 3)}, sleep=0.3)
    reduction = next(call for call in outline(trace).after if call.scope == "dp")
    assert reduction.waits_for[0] == ("dp", "dp")
    profile = fit_profile(trace)
    law = simulate(
        compile_profile(profile), num_samples=50_000, key=jax.random.key(0), sampling="plain"
    )
    times = trace.step_times()
    assert np.sum(times > 1.2 * np.median(times)) == 2
    more = (law.mean - law.quantile(0.5)) / (times.mean() - np.median(times))
    assert 0.7 < more < 2.0
