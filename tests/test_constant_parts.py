"""Rows of a profile besides means: constant parts of ops, as of a sleep; factors of positions."""

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.analysis import sample_step
from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.engine import simulate
from prism_jax.plot._chrome_trace import op_name
from prism_jax.profile import ladder, replayed_step_times, step_graph, traced_graph
from prism_jax.profile._clean import constant_parts, position_factors
from prism_jax.profile._profile import PositionFactor, WorkerMean
from prism_jax.trace import outline

from .helpers import by_hand, law_of_profile, refusal
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


def _never_varies(kind, worker, call, rng):
    same = kind == "forward-compute" and worker == 1
    return 0.25 if same else _alike(kind, worker, call, rng)


def _stages_differ(kind, worker, call, rng):
    """Stage 1 has five times the work, with a third of the noise."""
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)
    if kind == "microbatch":
        return 0.0
    odd = worker % 2
    return mean * (5 if odd else 1) * np.exp((0.06 if odd else 0.2) * rng.standard_normal())


def _latencies(trace):
    return traced_graph(trace, outline(trace))


def _constants(step, latencies):
    return {kind: constant_parts(latencies[kind])[..., 0, 0] for kind in step.phases}


@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 1), (4, 2)])
def test_a_sleep_is_found(dp, pp):
    job = _job(dp, pp)
    constants = _constants(*_latencies(_made_trace(job, 60, _sleeping)))
    assert not constants.pop("backward-compute").any()
    seconds = constants.pop("forward-compute").reshape(-1)
    assert not constants
    assert np.flatnonzero(seconds).tolist() == [1]
    # What varies is 0.1 s, and is known as well as its spread: to 1.17 / 60^0.5 on both sides.
    np.testing.assert_allclose(seconds[1], _SLEEP, atol=4 * 0.1 * 1.17 * np.sqrt(2 / 60))


@pytest.mark.parametrize(("dp", "pp", "most"), [(1, 2, 0.95 * 0.25), (4, 1, 0.15)])
def test_constant_part_of_an_op_has_an_upper_bound(dp, pp, most):
    """95 % of the latency or, beside workers with the same work, what the worker is slower by."""
    job = _job(dp, pp)
    constants = _constants(*_latencies(_made_trace(job, 60, _never_varies)))
    longest = max(seconds.max() for seconds in constants.values())
    np.testing.assert_allclose(longest, most, atol=4 * 0.1 * 0.2 * 1.25 / np.sqrt(4 * 60))


@pytest.mark.parametrize(
    ("latency", "spread"), [(_alike, 0.2), (_slower, 0.2), (_stages_differ, 0)]
)
def test_no_constant_part_is_found_in_noise(latency, spread):
    """Also where workers are up to eight times slower, stages differ, or steps share a factor."""
    job, rng, number = _job(4, 2), np.random.default_rng(0), 0
    step, latencies = _latencies(_made_trace(job, 30, latency))
    for _ in range(100):
        shared = np.exp(spread * rng.standard_normal(30))
        shuffled = {kind: rng.permuted(x, axis=3) * shared for kind, x in latencies.items()}
        number += sum(map(np.count_nonzero, _constants(step, shuffled).values()))
    # Of 800 pairs of a slower worker and a kind; two standard errors would find twenty.
    assert number <= 4


def test_a_worker_with_less_noise_has_no_constant_part():
    """Workers whose noise differs from one to the next: what is found is rare, and small."""
    job, rng, number = _job(8, 1), np.random.default_rng(0), 0
    step = step_graph(job, outline(_made_trace(job, 2, _alike)))
    worker = np.array([members[0] for members in step.members])
    for _ in range(50):
        level = np.exp(0.01 * rng.standard_normal((8, 1)))
        sigma = rng.uniform(0.05, 0.12, (8, 1))
        latencies = level[worker] * np.exp(sigma[worker] * rng.standard_normal((len(worker), 400)))
        for seconds in _constants(step, step.by_kind(latencies)).values():
            number += np.count_nonzero(seconds)
            assert seconds.max() < 0.05
    assert number <= 8  # Of 400 pairs.


def test_fitted_laws_keep_the_constant_part(tmp_path):
    """The noise of the other worker on the whole latency would spread steps by three times more."""
    job = _job(2, 1)
    trace = _made_trace(job, 200, _sleeping)
    profile = prism.fit_profile(trace)
    prism.save_profile(profile, tmp_path)
    assert prism.load_profile(tmp_path) == profile
    constants = [m for m in profile.means if m.kind.startswith("constant ")]
    assert [(m.kind, m.dp_rank, m.stage) for m in constants] == [("constant forward-compute", 1, 0)]
    law = law_of_profile(profile)
    times = trace.step_times()
    assert abs(law.mean - times.mean()) < 4 * times.std() / np.sqrt(len(times))
    assert abs(law.std / times.std() - 1) < 4 / np.sqrt(2 * len(times))
    assert any("dp_rank 1, stage 0 spreads less" in note for note in profile.fitted.notes)
    residual: Any = next(c for c in profile.fitted.components if c.name == "residual")
    assert abs(residual.value - 0.2) < 4 * residual.standard_error
    step = sample_step(prism.compile_profile(profile), num_samples=1_000, key=jax.random.key(0))
    names = {op_name(step, op) for op in range(len(step.receivers))}
    assert {"constant forward-compute", "optimizer", "launch optimizer", "PP:0F7"} <= names
    first, *_, last = ladder(trace, profile)
    assert abs(first.mean_s / times.mean() - 1) < 1e-6
    assert abs(last.mean_s / law.mean - 1) < 0.01


@pytest.mark.parametrize("blocking", [False, True])
def test_a_constant_part_is_time_before_the_op(blocking):
    job = msgspec.structs.replace(_job(2, 2), schedule=ScheduleConfig("1f1b", 4, blocking=blocking))
    trace = _made_trace(job, 30, _alike)
    step, latencies = _latencies(trace)
    seconds = step.by_op(latencies)
    parts = {("forward-compute", 1): 0.3, ("backward-compute", 2): 0.2}
    nodes = list(zip(step.kind, step.members, strict=True))
    constant = np.array([[parts.get((kind, members[0]), 0.0)] for kind, members in nodes])
    split = step_graph(job, outline(trace), constants=parts)
    old = iter(seconds)
    apart = [
        np.full(30, parts[kind.removeprefix("constant "), members[0]])
        if kind.startswith("constant ")
        else next(old)
        for kind, members in zip(split.kind, split.members, strict=True)
    ]
    assert len(apart) == len(seconds) + 2 * 4
    np.testing.assert_allclose(
        replayed_step_times(split, split.by_kind(np.array(apart))),
        replayed_step_times(step, step.by_kind(seconds + constant)),
        rtol=1e-12,
    )
    assert split.phases == step.phases
    assert split.computes.sum() == step.computes.sum()


def test_a_sleep_beside_positions_and_stalls():
    """Each of the three is found, and a stall costs what it takes beside the sleep."""

    def latency(kind, worker, call, rng):
        first = kind == "forward-compute" and call == 0
        late = 3.0 if kind == "forward-compute" and worker == 1 and rng.random() < 0.006 else 0.0
        varies = _alike(kind, worker, call, rng) * (0.3 if first else 1)
        return varies + late + _SLEEP * (kind == "forward-compute" and worker == 1)

    trace = _made_trace(_job(2, 1), 200, latency)
    profile = prism.fit_profile(trace)
    (constant,) = (m.mean_s for m in profile.means if m.kind == "constant forward-compute")
    assert constant == pytest.approx(_SLEEP, abs=4 * 0.1 * 1.17 * np.sqrt(2 / 200))
    forward = {p.microbatch: p.factor for p in profile.positions if p.kind == "forward-compute"}
    assert forward[0] / forward[1] == pytest.approx(0.3, abs=0.1)
    (stall,) = (v for v in profile.variability if v.component == "stall")
    assert stall.parameters["median_s"] == pytest.approx(3.0, rel=0.03)
    law = law_of_profile(profile)
    times = trace.step_times()
    assert abs(law.mean - times.mean()) < 4 * times.std() / np.sqrt(len(times))
    assert abs(law.quantile(0.5) / np.median(times) - 1) < 0.01


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (WorkerMean("constant optimizer", 0, 0, 0.1), "stage 0, where no compute is of this kind"),
        (WorkerMean("optimiser", 0, 1, 0.1), "`optimiser` on dp_rank 0, stage 1, where no op"),
        (WorkerMean("constant forward-compute", 0, 0, 0.1, 2.0), "data do not act on a constant"),
    ],
)
def test_a_row_that_no_op_uses_is_refused(row, says):
    profile = prism.fit_profile(_made_trace(_job(1, 2), 30, _alike))
    profile = msgspec.structs.replace(profile, means=(*profile.means, row))
    with pytest.raises(ValueError, match=says):
        prism.compile_profile(profile)


_FACTORS = {("forward-compute", 0): 0.4, ("forward-compute", 1): 1.2, ("backward-compute", 3): 1.5}


def _worker_by_worker(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.0
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-3)
    return mean * (1 + worker) * np.exp(0.1 * rng.standard_normal())


def _by_position(kind, worker, call, rng):
    return _worker_by_worker(kind, worker, call, rng) * _FACTORS.get((kind, call), 1.0)


@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 2), (2, 1)])
def test_positions_are_found_where_they_are(dp, pp):
    job = _job(dp, pp)
    _, latencies = _latencies(_made_trace(job, 60, _by_position))
    for kind, x in latencies.items():
        factors = position_factors(x)
        truth = np.array([_FACTORS.get((kind, m), 1.0) for m in range(x.shape[2])])
        if np.all(truth == 1):
            assert np.all(factors == 1)
            continue
        expected = np.broadcast_to(truth / truth.mean(), (pp, 4))
        np.testing.assert_allclose(factors[0, ..., 0], expected, atol=5 * 0.1 / np.sqrt(60 * dp))
        np.testing.assert_allclose(factors.mean(axis=2), 1, rtol=1e-12)


@pytest.mark.parametrize("shared", [0.0, 0.3])
def test_no_factors_of_positions_are_found_in_noise(shared):
    """Also where the replicas share what a microbatch of a step takes."""
    rng, number = np.random.default_rng(0), 0
    for _ in range(200):
        logs = 0.1 * rng.standard_normal((4, 8, 2, 4, 12)) + shared * rng.standard_normal((4, 12))
        number += any(np.any(position_factors(x) != 1) for x in np.exp(logs))
    # Four kinds of ops of two stages, or all alike; one in a thousand each.
    assert number <= 8


def test_the_law_of_a_fit_has_them():
    """And not as noise, which would be four times the residual that is there."""
    job = _job(2, 2)
    trace = _made_trace(job, 200, _by_position)
    profile = prism.fit_profile(trace)
    assert profile.positions
    residual: Any = next(c for c in profile.fitted.components if c.name == "residual")
    assert abs(residual.value - 0.1) < 4 * residual.standard_error
    law = law_of_profile(profile)
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
    replayed = replayed_step_times(step, step.by_kind(seconds[:, None]))[0]
    np.testing.assert_allclose(law.mean, replayed, rtol=1e-12)
    prism.save_profile(msgspec.structs.replace(profile, positions=()), tmp_path)
    assert prism.load_profile(tmp_path).positions == ()


def test_rows_that_are_of_no_op_or_twice_are_refused(tmp_path):
    job = _job(1, 2)
    profile = prism.fit_profile(_made_trace(job, 30, _by_position))
    row = PositionFactor("forward-compute", 0, 4, 1.1)
    with pytest.raises(ValueError, match="for microbatch 4, which no step has"):
        prism.compile_profile(msgspec.structs.replace(profile, positions=(row,)))
    prism.save_profile(msgspec.structs.replace(profile, positions=(row, row)), tmp_path)
    refusal(lambda: prism.load_profile(tmp_path), "has two rows")
    text = (tmp_path / "positions.csv").read_text().replace("1.1", "-1")
    (by_hand(tmp_path) / "positions.csv").write_text(text)
    refusal(lambda: prism.load_profile(tmp_path), "factor")
