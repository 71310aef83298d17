"""Two classes of sends and receives."""

import numpy as np
import pytest

from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.profile import compile_profile, fit_profile, load_profile, save_profile
from prism_jax.profile._observe import two_classes

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
    found = two_classes(values)
    assert found is not None
    threshold, _, explained = found
    assert logs[cut - 1] < np.log(threshold) < logs[cut]
    assert explained == pytest.approx(1 - min(inner) / (9 * np.var(logs)))
    assert two_classes(np.ones(5)) is None


def test_the_best_threshold_explains_two_over_pi_of_a_normal_law():
    """What the best threshold explains of a normal law tends to 2 / pi."""
    found = two_classes(np.exp(np.random.default_rng(0).standard_normal(20_000)))
    assert found is not None
    assert found[2] == pytest.approx(2 / np.pi, abs=0.01)
