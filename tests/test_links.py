"""Links and waits that a trace tells: slow links between nodes, waits within a step, stalls."""

from typing import Any

import numpy as np
import pytest

from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.profile import (
    compile_profile,
    fit_profile,
    load_profile,
    replayed_step_times,
    save_profile,
    traced_graph,
)
from prism_jax.profile._observe import two_classes, with_inner_waits
from prism_jax.trace import outline

from .test_trace import _made_trace


def _latency(slower):
    def latency(kind, worker, call, rng):
        if kind == "microbatch":
            return 0.0
        far = kind.startswith("forward-send_recv") and worker % 4 == 1
        far |= kind.startswith("backward-send_recv") and worker % 4 == 2
        mean = 1e-3 * (slower if far else 1.0) if "send_recv" in kind else 0.05
        return mean * np.exp(0.05 * rng.standard_normal())

    return latency


@pytest.mark.parametrize("slower", [1.5, 8.0])
def test_links_between_nodes_have_laws_of_their_own(tmp_path, slower):
    job = Job(Layout(dp=2, pp=4), ScheduleConfig("1f1b", 3, blocking=False), name="made")
    save_profile(fit_profile(_made_trace(job, 5, _latency(slower))), tmp_path / "p")
    profile = load_profile(tmp_path / "p")
    slow = profile.outline.slow_links
    assert slow == (((1, 2), (5, 6)) if slower == 8 else ())
    means = {m.kind: m.mean_s for m in profile.means if m.kind.startswith("forward-send_recv")}
    assert len(means) == 1 + bool(slow)
    if slow:
        assert means["forward-send_recv slow link"] == pytest.approx(8e-3, rel=0.2)
        assert means["forward-send_recv"] == pytest.approx(1e-3, rel=0.2)
        assert "forward-send_recv slow link" in compile_profile(profile).latencies.kinds


@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_is_that_of_the_most_variance_between(seed):
    """Against all cuts, one after the other."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.standard_normal(9))
    logs = np.sort(np.log(values))
    inner = [np.var(logs[:n]) * n + np.var(logs[n:]) * (9 - n) for n in range(1, 9)]
    cut = 1 + int(np.argmin(inner))
    found: Any = two_classes(values)
    threshold, _, explained = found
    assert logs[cut - 1] < np.log(threshold) < logs[cut]
    assert explained == pytest.approx(1 - min(inner) / (9 * np.var(logs)))
    assert two_classes(np.ones(5)) is None


def test_the_best_threshold_explains_two_over_pi_of_a_normal_law():
    """What the best threshold explains of a normal law tends to 2 / pi."""
    found = two_classes(np.exp(np.random.default_rng(0).standard_normal(20_000)))
    assert found[2] == pytest.approx(2 / np.pi, abs=0.01)


def _latency_of_waits(kind, worker, call, rng):
    if kind == "microbatch":
        return 0.0
    mean = {"forward-compute": 0.1, "backward-compute": 0.2}.get(kind, 1e-4)
    return mean * np.exp(0.1 * rng.standard_normal())


@pytest.mark.parametrize(
    "gathered", [(), ("backward-compute",), ("forward-compute", "backward-compute")]
)
@pytest.mark.parametrize("pp", [1, 2])
def test_waits_of_replicas_within_a_step_are_found(gathered, pp):
    """And shuffled ops have the mean of the steps; without the wait they take far longer."""
    job = Job(Layout(dp=4, pp=pp), ScheduleConfig("1f1b", 2, blocking=False), name="made")
    trace = _made_trace(job, 200, _latency_of_waits, seed=pp, gathered=gathered)
    plain = outline(trace)
    found = with_inner_waits(plain, trace)
    assert found.gathered == gathered
    mean, rng = trace.step_times().mean(), np.random.default_rng(0)
    moved = {}
    for name, shape in (("with", found), ("without", plain)):
        step, latencies = traced_graph(trace, shape)
        np.testing.assert_allclose(
            replayed_step_times(step, latencies), trace.step_times(), rtol=1e-9
        )
        shuffled = {k: rng.permuted(np.tile(x, 5), axis=3) for k, x in latencies.items()}
        moved[name] = replayed_step_times(step, shuffled).mean() / mean - 1
    error = trace.step_times().std() / np.sqrt(200) / mean
    assert abs(moved["with"]) < 4 * error
    assert moved["without"] > 4 * error or not gathered


def test_one_replica_waits_for_none():
    job = Job(Layout(pp=2), ScheduleConfig("1f1b", 2), name="made")
    trace = _made_trace(job, 5, _latency_of_waits)
    assert with_inner_waits(outline(trace), trace) == outline(trace)
