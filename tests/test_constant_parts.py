"""Workers whose ops have a part that does not vary, such as a sleep."""

import jax
import msgspec
import numpy as np
import pytest

from prism_jax.data import (
    Job,
    Layout,
    ScheduleConfig,
    WorkerMean,
    load_profile,
    save_profile,
)
from prism_jax.engine import simulate
from prism_jax.fitting import fit_profile, ladder
from prism_jax.fitting._constant_parts import constant_parts
from prism_jax.program import compile_profile, op_latencies, replay, step_graph, with_constants
from prism_jax.trace import outline

from .test_trace import _made_trace


_SLEEP = 0.5


def _job(dp, pp):
    return Job(Layout(dp=dp, pp=pp), ScheduleConfig("1f1b", 4, blocking=False), name="made")


def _alike(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.0
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)
    return mean * np.exp(0.2 * rng.standard_normal())


def _slower(kind, worker, call, rng):
    return _alike(kind, worker, call, rng) * (1 + (worker or 0))


def _sleeping(kind, worker, call, rng):
    sleeps = kind == "forward-compute" and worker == 1
    return _alike(kind, worker, call, rng) + _SLEEP * sleeps


def _found(job, trace):
    step = step_graph(job, outline(trace))
    return step, constant_parts(job, step, op_latencies(trace, step))


@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 1), (4, 2)])
def test_a_sleep_is_found(dp, pp):
    job = _job(dp, pp)
    step, found = _found(job, _made_trace(job, 60, _sleeping))
    nodes = zip(step.kind, step.members, strict=True)
    sleeps = np.array([kind == "forward-compute" and members == (1,) for kind, members in nodes])
    assert np.all(found[~sleeps] == 0)
    # What varies is 0.1 s, and is known as well as its spread: to 1.17 / 60^0.5 on both sides.
    np.testing.assert_allclose(found[sleeps], _SLEEP, atol=4 * 0.1 * 1.17 * np.sqrt(2 / 60))


@pytest.mark.parametrize("latency", [_alike, _slower])
def test_none_is_found_where_none_is(latency):
    """Also where workers are up to eight times slower, and steps share a factor."""
    job, rng, number = _job(4, 2), np.random.default_rng(0), 0
    trace = _made_trace(job, 30, latency)
    step = step_graph(job, outline(trace))
    latencies = op_latencies(trace, step)
    for _ in range(100):
        shared = np.exp(0.2 * rng.standard_normal(30))
        shuffled = np.array([rng.permutation(x) for x in latencies])
        number += int(np.any(constant_parts(job, step, shuffled * shared) > 0))
    # Of 1,600 pairs of a worker and a kind, with a probability of 3e-5 each.
    assert number <= 1


def test_the_law_of_a_fit_has_it(tmp_path):
    """The noise of the other worker on the whole latency would spread steps by three times more."""
    job = _job(2, 1)
    trace = _made_trace(job, 200, _sleeping)
    profile = fit_profile(trace)
    save_profile(profile, tmp_path)
    assert load_profile(tmp_path) == profile
    constants = [m for m in profile.means if m.kind.startswith("constant ")]
    assert [(m.kind, m.dp_rank, m.stage) for m in constants] == [("constant forward-compute", 1, 0)]
    law = simulate(compile_profile(profile), num_samples=20_000, key=jax.random.key(0))
    times = trace.step_times()
    assert abs(law.mean - times.mean()) < 4 * times.std() / np.sqrt(len(times))
    assert abs(law.std / times.std() - 1) < 4 / np.sqrt(2 * len(times))
    assert any("has a part of 0.5" in note for note in profile.fitted.notes)
    residual = next(c for c in profile.fitted.components if c.name == "residual")
    assert residual.value is not None
    assert residual.standard_error is not None
    assert abs(residual.value - 0.2) < 4 * residual.standard_error
    first, *_, last = ladder(trace, profile)
    assert abs(first.mean_s / times.mean() - 1) < 1e-6
    assert abs(last.mean_s / law.mean - 1) < 0.01


@pytest.mark.parametrize("blocking", [False, True])
def test_a_constant_part_is_time_before_the_op(blocking):
    job = msgspec.structs.replace(_job(2, 2), schedule=ScheduleConfig("1f1b", 4, blocking=blocking))
    trace = _made_trace(job, 30, _alike)
    step = step_graph(job, outline(trace))
    seconds = op_latencies(trace, step)
    parts = {("forward-compute", 1): 0.3, ("backward-compute", 2): 0.2}
    nodes = list(zip(step.kind, step.members, strict=True))
    constant = np.array([[parts.get((kind, members[0]), 0.0)] for kind, members in nodes])
    split = with_constants(step, parts)
    old = iter(seconds)
    apart = [
        np.full(30, parts[kind.removeprefix("constant "), members[0]])
        if kind.startswith("constant ")
        else next(old)
        for kind, members in zip(split.kind, split.members, strict=True)
    ]
    assert len(apart) == len(seconds) + 2 * 4
    np.testing.assert_allclose(
        replay(split, np.array(apart)), replay(step, seconds + constant), rtol=1e-12
    )
    assert split.phases == step.phases
    assert split.computes.sum() == step.computes.sum()
    assert with_constants(step, {}) is step


def test_a_row_that_is_of_no_compute_is_refused():
    profile = fit_profile(_made_trace(_job(1, 2), 30, _alike))
    row = WorkerMean("constant optimizer", 0, 0, 0.1)
    profile = msgspec.structs.replace(profile, means=(*profile.means, row))
    with pytest.raises(ValueError, match="`constant optimizer` on dp_rank 0, stage 0, where no"):
        compile_profile(profile)
