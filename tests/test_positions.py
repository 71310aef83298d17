"""Microbatches that take longer or shorter for their position in the step."""

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.engine import simulate
from prism_jax.profile import op_latencies, replayed_step_times, step_graph
from prism_jax.profile._clean import find_positions
from prism_jax.profile._profile import PositionFactor
from prism_jax.trace import outline

from .helpers import by_hand
from .test_trace import _made_trace


_FACTORS = {("forward-compute", 0): 0.4, ("forward-compute", 1): 1.2, ("backward-compute", 3): 1.5}


def _job(dp, pp):
    return Job(Layout(dp=dp, pp=pp), ScheduleConfig("1f1b", 4, blocking=False), name="made")


def _alike(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.0
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)
    return mean * (1 + worker) * np.exp(0.1 * rng.standard_normal())


def _by_position(kind, worker, call, rng):
    return _alike(kind, worker, call, rng) * _FACTORS.get((kind, call), 1.0)


def _found(job, trace):
    step = step_graph(job, outline(trace))
    return step, find_positions(step, op_latencies(trace, step))


@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 2), (2, 1)])
def test_positions_are_found_where_they_are(dp, pp):
    job = _job(dp, pp)
    _, found = _found(job, _made_trace(job, 60, _by_position))
    names = {(kind, stage) for kind, _ in _FACTORS for stage in range(pp)}
    assert {(one.kind, one.stage) for one in found} == names
    for kind, stage in names:
        mine = {p.microbatch: p.factor for p in found if (p.kind, p.stage) == (kind, stage)}
        truth = np.array([_FACTORS.get((kind, m), 1.0) for m in range(4)])
        np.testing.assert_allclose(
            [mine[m] for m in range(4)], truth / truth.mean(), atol=5 * 0.1 / np.sqrt(60 * dp)
        )
        assert np.isclose(np.mean(list(mine.values())), 1.0, atol=1e-12)


@pytest.mark.parametrize("shared", [0.0, 0.3])
def test_no_factors_of_positions_are_found_in_noise(shared):
    """Also where the replicas share what a microbatch of a step takes."""
    rng, found = np.random.default_rng(0), 0
    job = _job(8, 2)
    step = step_graph(job, outline(_made_trace(job, 4, _alike)))
    call = np.array(step.call)
    for _ in range(200):
        logs = 0.1 * rng.standard_normal((len(step.kind), 12))
        logs += shared * rng.standard_normal((4, 12))[call]
        found += bool(find_positions(step, np.exp(logs)))
    # Eight kinds of ops of a stage, or all alike; one in a thousand each.
    assert found <= 8


def test_the_law_of_a_fit_has_them():
    """And not as noise, which would be four times the residual that is there."""
    job = _job(2, 2)
    trace = _made_trace(job, 200, _by_position)
    profile = prism.fit_profile(trace)
    assert profile.positions
    residual = next(c for c in profile.fitted.components if c.name == "residual")
    assert residual.value is not None
    assert residual.standard_error is not None
    assert abs(residual.value - 0.1) < 4 * residual.standard_error
    law = simulate(
        prism.compile_profile(profile), num_samples=20_000, key=jax.random.key(0), sampling="plain"
    )
    times = trace.step_times()
    assert abs(law.mean - times.mean()) < 4 * times.std() / np.sqrt(len(times))
    assert abs(law.std / times.std() - 1) < 4 / np.sqrt(2 * len(times))


def test_a_program_without_variability_is_the_replay_of_means(tmp_path):
    job = _job(2, 2)
    trace = _made_trace(job, 60, _by_position)
    profile = msgspec.structs.replace(prism.fit_profile(trace), variability=(), sets=())
    prism.save_profile(profile, tmp_path)
    assert prism.load_profile(tmp_path) == profile
    step = step_graph(job, profile.outline)
    means = {(m.kind, m.dp_rank * 2 + m.stage): m.mean_s for m in profile.means}
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in profile.positions}
    nodes = zip(step.kind, step.members, step.call, step.twin, strict=True)
    seconds = np.array(
        [
            0.0 if twin else means[kind, m[0]] * factors.get((kind, m[0] % 2, call), 1.0)
            for kind, m, call, twin in nodes
        ]
    )
    law = simulate(
        prism.compile_profile(profile), num_samples=4, key=jax.random.key(0), sampling="plain"
    )
    np.testing.assert_allclose(law.mean, replayed_step_times(step, seconds[:, None])[0], rtol=1e-12)
    prism.save_profile(msgspec.structs.replace(profile, positions=()), tmp_path)
    assert prism.load_profile(tmp_path).positions == ()


def test_rows_that_are_of_no_op_or_twice_are_refused(tmp_path):
    job = _job(1, 2)
    profile = prism.fit_profile(_made_trace(job, 30, _by_position))
    row = PositionFactor("forward-compute", 0, 4, 1.1)
    with pytest.raises(ValueError, match="for microbatch 4, which no step has"):
        prism.compile_profile(msgspec.structs.replace(profile, positions=(row,)))
    prism.save_profile(msgspec.structs.replace(profile, positions=(row, row)), tmp_path)
    with pytest.raises(ValueError, match="has two rows"):
        prism.load_profile(tmp_path)
    text = (tmp_path / "positions.csv").read_text().replace("1.1", "-1")
    (by_hand(tmp_path) / "positions.csv").write_text(text)
    with pytest.raises(ValueError, match="factor"):
        prism.load_profile(tmp_path)
