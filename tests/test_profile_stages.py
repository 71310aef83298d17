"""Each stage of a fit finds the one thing that was planted for it, in latencies that are known."""

import numpy as np
import pytest

from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.profile._clean import clean_up
from prism_jax.profile._fit import describe_components, fit_laws, means_of, split_compute
from prism_jax.profile._observe import observe

from .test_trace import _made_trace


_STEPS, _SPREAD = 60, 0.02
_STALL, _SLEEP, _SLOW = 2.0, 0.3, 1.5
_MEANS = {"forward-compute": 0.1, "backward-compute": 0.2, "optimizer": 0.02}


def _planted(kind, worker, call, rng):
    """Worker 2 sleeps in each forward, and its backwards take longer."""
    if kind == "microbatch":
        return 0.0
    seconds = _MEANS.get(kind, 1e-3) * np.exp(_SPREAD * rng.standard_normal())
    if worker == 2 and kind == "forward-compute":
        return seconds + _SLEEP
    return seconds * (_SLOW if worker == 2 and kind == "backward-compute" else 1)


@pytest.fixture(scope="module")
def stages():
    """What the first three stages find; the optimizer of worker 2 stalls once."""
    stalled = iter(np.arange(4 * _STEPS) == 4 * 30 + 2)

    def latency(kind, worker, call, rng):
        stall = kind == "optimizer" and next(stalled)
        return _planted(kind, worker, call, rng) + _STALL * stall

    schedule = ScheduleConfig("1f1b", 4)
    seen = observe(_made_trace(Job(Layout(dp=2, pp=2), schedule, name="made"), _STEPS, latency))
    clean = clean_up(seen)
    return seen, clean, split_compute(seen, clean)


def _ops(seen, kind, worker):
    pairs = zip(seen.step.kind, seen.step.members, strict=True)
    return [op for op, (k, members) in enumerate(pairs) if k == kind and members == (worker,)]


def test_the_latencies_are_those_of_the_trace(stages):
    seen = stages[0]
    assert seen.off < 1e-9
    (op,) = _ops(seen, "optimizer", 2)
    assert np.flatnonzero(seen.latencies[op] > 1).tolist() == [30]


def test_the_stall_and_the_sleep_are_taken_out(stages):
    seen, clean, _ = stages
    (op,) = _ops(seen, "optimizer", 2)
    assert np.argwhere(np.isnan(clean.body)).tolist() == [[op, 30]]
    (law,) = clean.stalls
    assert law.kernel == "optimizer"
    assert law.parameters["median_s"] == pytest.approx(_STALL, rel=0.05)
    forwards = _ops(seen, "forward-compute", 2)
    assert np.flatnonzero(clean.constant).tolist() == forwards
    np.testing.assert_allclose(clean.constant[forwards], _SLEEP, rtol=0.4)
    assert clean.positions == ()


def test_the_means_and_the_spread_are_split(stages):
    seen, _, split = stages
    assert split.apart.value("residual") == pytest.approx(_SPREAD, rel=0.1)
    of = {w: split.mean[_ops(seen, "backward-compute", w)[0]] for w in range(4)}
    assert of == pytest.approx({0: 0.2, 1: 0.2, 2: 0.2 * _SLOW, 3: 0.2}, rel=0.01)


def test_the_laws_the_notes_and_the_means(stages):
    seen, clean, split = stages
    (laws, sets), fitted = fit_laws(seen, clean, split), describe_components(seen, clean, split)
    by_kind = {(law.kernel, law.component): law for law in laws}
    assert by_kind["optimizer", "stall"] is clean.stalls[0]
    assert by_kind["forward-compute", "residual"].family == "lognormal"
    assert sets == ()
    (note,) = (note for note in fitted.notes if "did not vary" in note)
    assert note.startswith("`forward-compute` of dp_rank 1, stage 0 ")
    means = means_of(seen, clean, split)
    constant = [(m.kind, m.dp_rank, m.stage) for m in means if "constant" in m.kind]
    assert constant == [("constant forward-compute", 1, 0)]
    assert means[-1].mean_s == clean.constant.max()
