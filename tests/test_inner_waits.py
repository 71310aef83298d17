"""Compute that begins with a wait for other replicas, which no row tells."""

import numpy as np
import pytest

from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.profile import op_latencies, replayed_step_times, step_graph
from prism_jax.profile._observe import with_inner_waits
from prism_jax.trace import outline

from .test_trace import _made_trace


def _latency(kind, worker, call, rng):
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
    trace = _made_trace(job, 200, _latency, seed=pp, gathered=gathered)
    plain = outline(trace)
    found = with_inner_waits(plain, trace)
    assert found.gathered == gathered
    mean, rng = trace.step_times().mean(), np.random.default_rng(0)
    moved = {}
    for name, shape in (("with", found), ("without", plain)):
        step = step_graph(job, shape)
        latencies = op_latencies(trace, step)
        np.testing.assert_allclose(
            replayed_step_times(step, latencies), trace.step_times(), rtol=1e-9
        )
        shuffled = np.tile(latencies, 5)
        moved[name] = replayed_step_times(step, rng.permuted(shuffled, axis=1)).mean() / mean - 1
    error = trace.step_times().std() / np.sqrt(200) / mean
    assert abs(moved["with"]) < 4 * error
    assert moved["without"] > 4 * error or not gathered


def test_one_replica_waits_for_none():
    job = Job(Layout(pp=2), ScheduleConfig("1f1b", 2), name="made")
    trace = _made_trace(job, 5, _latency)
    assert with_inner_waits(outline(trace), trace) == outline(trace)
