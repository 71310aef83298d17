"""Components of made latencies, whose truth is known, and the stages that find them."""

import numpy as np
import pytest

from prism_jax._estimate import stalled
from prism_jax.data import Job, Layout, ScheduleConfig
from prism_jax.profile._clean import clean_up
from prism_jax.profile._components import split_compute, take_apart
from prism_jax.profile._data_factor import rough_data
from prism_jax.profile._effects import ALIKE
from prism_jax.profile._fit import describe_components, means_of, stall_rate_component
from prism_jax.profile._laws import fit_laws
from prism_jax.profile._observe import observe
from prism_jax.profile._step_factor import minus_log_likelihood, of_steps

from .test_trace import _made_trace


_TRUTH = {"rank": 0.02, "step": 0.01, "step_autocorrelation": 0.9, "worker_step": 0.006}
_TRUTH |= {"microbatch": 0.03, "residual": 0.01, "stall_rate": 1e-4}


def _components(logs, steps):
    """Those of latencies with stalls."""
    of_data = rough_data(list(np.moveaxis(np.exp(logs), 2, 0)))
    stalls = stalled(logs - np.log(of_data), (3, 4), ALIKE)
    apart = take_apart(np.where(stalls, np.nan, logs), steps)
    return (
        *apart.components,
        stall_rate_component(int(np.sum(stalls)), int(np.sum(~np.isnan(logs)))),
    )


def _made(seed, *, replicas, stages, steps, microbatches=8, missing=False):
    """Logarithms of latencies: what all workers, a worker, a step and a microbatch share."""
    rng = np.random.default_rng(seed)
    decay = _TRUTH["step_autocorrelation"]
    factor = np.empty(steps)
    factor[0] = rng.standard_normal()
    for t in range(1, steps):
        factor[t] = decay * factor[t - 1] + np.sqrt(1 - decay**2) * rng.standard_normal()
    shape = (replicas, stages, 2, microbatches, steps)

    def noise(name, *shape):
        return _TRUTH[name] * rng.standard_normal(shape)

    logs = (
        np.log([1.0, 2.0])[:, None, None]
        + 0.1 * rng.standard_normal((1, stages, 1, 1, 1))
        + _TRUTH["step"] * factor
        + noise("rank", replicas, stages, 1, 1, 1)
        + noise("worker_step", replicas, stages, 1, 1, steps)
        + noise("microbatch", replicas, 1, 1, microbatches, steps)
        + noise("residual", *shape)
    )
    stalled = rng.random(shape) < _TRUTH["stall_rate"]
    logs = np.where(stalled, logs + np.log(1.5 + rng.exponential(2.0, shape)), logs)
    if missing:
        logs = np.where(rng.random(shape) < 0.2, np.nan, logs)
        for replica in logs:  # Some replicas join late.
            replica[..., : rng.integers(0, steps // 3)] = np.nan
    return logs, np.arange(steps)


# With how many repetitions. A step's factor that remembers ten steps is hardly seen in fifty.
_SHAPES = {
    "8 workers, 50 steps": ({"replicas": 4, "stages": 2, "steps": 50}, 60),
    "64 workers, 100 steps": ({"replicas": 8, "stages": 8, "steps": 100}, 12),
    "unbalanced": ({"replicas": 4, "stages": 2, "steps": 60, "missing": True}, 60),
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_components_are_recovered(shape):
    """Without a bias but of what a short trace cannot tell, and with the errors that repetitions
    show. `pytest -s` prints the biases."""
    arguments, repetitions = _SHAPES[shape]
    found = [_components(*_made(seed, **arguments)) for seed in range(repetitions)]
    for i, (name, truth) in enumerate((c.name, _TRUTH[c.name]) for c in found[0]):
        # Now and then a short trace shows no factor of steps, and so no autocorrelation.
        known = [each[i] for each in found if each[i].value is not None]
        assert len(known) >= 0.8 * repetitions if "step" in name else len(known) == repetitions
        values = np.array([c.value for c in known])
        stated = np.array([c.standard_error for c in known])
        scatter = np.std(values, ddof=1)
        print(f"{shape}: {name} {values.mean() / truth - 1:+.1%}, scatter {scatter / truth:.1%}")
        bias = abs(values.mean() - truth) / (scatter / np.sqrt(repetitions))
        if name in ("step", "step_autocorrelation"):
            # Now and then a short trace shows no memory at all.
            assert -0.25 < values.mean() / truth - 1 < 0.05, name
        else:
            assert bias < 4, name
        typical = np.subtract(*np.quantile(values, [0.75, 0.25])) / 1.349
        assert 0.4 < np.median(stated) / typical < 2.5, name


def test_longer_traces_are_less_biased():
    """The autocorrelation is too low in short traces, and right in long ones."""
    means = []
    for steps, repetitions in ((50, 30), (400, 10)):
        found = [
            _components(*_made(100 + i, replicas=4, stages=2, steps=steps))
            for i in range(repetitions)
        ]
        (place,) = [i for i, c in enumerate(found[0]) if c.name == "step_autocorrelation"]
        values = [each[place].value for each in found if each[place].value is not None]
        means.append(np.mean(np.array(values, float)))
    assert means[0] < means[1] < 0.92
    assert means[1] == pytest.approx(0.9, abs=0.03)


def test_components_that_data_do_not_determine_have_a_note():
    logs, _ = _made(0, replicas=1, stages=1, steps=30)
    by_name = {c.name: c for c in _components(logs, 10 * np.arange(30))}
    assert by_name["rank"].value is None
    assert "one replica" in by_name["rank"].note
    assert by_name["worker_step"].value is None
    assert by_name["step_autocorrelation"].value is None
    assert "neighbouring" in by_name["step_autocorrelation"].note
    assert by_name["microbatch"].value == pytest.approx(0.03, rel=0.3)
    few = {c.name: c for c in _components(logs[..., :2], np.arange(2))}
    assert few["step"].value is None


def _filtered(factor, noise, steps, variance, decay):
    gaps, which = np.unique(np.diff(steps, prepend=steps[0]), return_inverse=True)
    rows = (factor.tolist(), noise.tolist(), which.tolist())
    return minus_log_likelihood(rows, gaps.astype(float), variance, decay)


def test_the_filter_gives_the_likelihood_of_the_dense_covariance():
    """With gaps, at and inside the bounds; a mean that is profiled out with its determinant."""
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.integers(1, 5, 90))
    factor, noise = rng.standard_normal(90), 0.05 + rng.random(90)
    for variance, decay in ((0.7, 0.9), (0.3, 0.0), (0.0, 0.5), (2.0, 1 - 1e-6), (0.5, -0.3)):
        gaps = np.abs(steps[:, None] - steps).astype(float)
        covariance = variance * decay**gaps + np.diag(noise)
        ones = np.ones(90)
        of_ones, of_factor = np.linalg.solve(covariance, np.stack([ones, factor], axis=1)).T
        left = factor @ of_factor - (ones @ of_factor) ** 2 / (ones @ of_ones)
        dense = (np.linalg.slogdet(covariance)[1] + np.log(ones @ of_ones) + left) / 2
        found = _filtered(factor, noise, steps, variance, decay)
        assert found == pytest.approx(dense, abs=1e-8)


def _remembering(rng, decay, number):
    factor = rng.standard_normal(number)
    for t in range(1, number):
        factor[t] = decay * factor[t - 1] + np.sqrt(1 - decay**2) * factor[t]
    return factor


def test_thousands_of_steps_are_exact_and_quick():
    rng = np.random.default_rng(1)
    number = 5000
    factor = 0.01 * _remembering(rng, 0.9, number) + 0.003 * rng.standard_normal(number)
    noise = np.full(number, 9e-6)
    step, memory = of_steps(factor, noise, np.arange(number))
    for component, truth in ((step, 0.01), (memory, 0.9)):
        assert component.standard_error is not None
        assert component.value is not None
        assert abs(component.value - truth) < 4 * component.standard_error
        assert component.standard_error < 0.05 * truth


def test_a_step_that_has_no_factor():
    """Zero is within its errors, none of which is zero, and what does not exist has no memory."""
    rng = np.random.default_rng(2)
    seen, away = 0, []
    for _ in range(30):
        factor = 0.01 * rng.standard_normal(50)
        step, memory = of_steps(factor, np.full(50, 1e-4), np.arange(50))
        assert step.standard_error > 1e-4
        # Of the variance: the standard error of a deviation near zero is that of its root.
        away.append(step.value**2 / (1e-4 * np.sqrt(2 / 49)))
        seen += memory.value is not None
        if memory.value is None:
            assert "no factor of steps is seen" in memory.note
    assert seen <= 3
    assert np.median(away) < 1
    assert np.max(away) < 4
    assert np.mean(np.array(away) > 2) <= 0.1


def test_step_times_contradict_a_factor_that_not_every_op_has():
    """Ops that steps wait for have a third of it; and the same noise is in both."""
    rng = np.random.default_rng(4)
    number, spread = 200, 0.003
    factor, noise = 0.01 * rng.standard_normal(number), spread * rng.standard_normal(number)
    given = np.full(number, spread**2), np.arange(number)
    others = 0.004 * rng.standard_normal(number)
    step, _ = of_steps(factor + noise, *given, np.exp(factor / 3 + noise + others))
    assert step.standard_error is not None
    assert step.value is not None
    assert step.value == pytest.approx(0.01 / 3, abs=3 * step.standard_error)
    assert step.standard_error < 0.001
    assert step.note.startswith("0.0")
    # What step times do not contradict stays as it is.
    step, _ = of_steps(factor + noise, *given, np.exp(factor + noise + others))
    assert step == of_steps(factor + noise, *given)[0]
    # A stall is no contradiction.
    times = np.exp(factor + noise + others)
    times[np.argmin(factor)] *= 3
    step, _ = of_steps(factor + noise, *given, times)
    assert step.value == pytest.approx(0.01, rel=0.15)
    assert step.note == "without 1 step far from the others"


def test_a_worker_whose_phases_differ_has_no_residual_by_that():
    """The mean of each of its phases is known, as a profile has it."""
    logs, steps = _made(5, replicas=4, stages=2, steps=30)
    logs[0, 0, 0] += 0.3
    found = {c.name: c for c in _components(logs, steps)}
    assert found["residual"].value == pytest.approx(0.01, rel=0.03)


def test_a_factor_without_memory_has_an_autocorrelation_with_an_error():
    rng = np.random.default_rng(3)
    for _ in range(10):
        step, memory = of_steps(0.02 * rng.standard_normal(60), np.full(60, 1e-5), np.arange(60))
        assert step.value == pytest.approx(0.02, rel=0.4)
        assert memory.standard_error is not None
        assert memory.value is not None
        assert memory.standard_error > 0.05
        assert memory.value < 4 * memory.standard_error


def _by_name(logs):
    return {c.name: c for c in _components(logs, np.arange(logs.shape[-1]))}


def test_latencies_that_are_all_alike():
    found = _by_name(np.full((2, 3, 2, 4, 30), -2.0))
    stalls = found.pop("stall_rate")
    assert stalls.value == 0.0
    for component in found.values():
        assert component.value is None
        assert component.standard_error is None
        assert component.note
    # Workers that differ, each of them always the same: that is told, and nothing else.
    logs = np.full((4, 2, 2, 4, 30), -2.0) + 0.01 * np.arange(4)[:, None, None, None, None]
    found = _by_name(logs)
    assert found["rank"].value == pytest.approx(0.01 * np.std(np.arange(4), ddof=1))
    assert found["residual"].value is None
    assert found["step"].value is None


def test_no_latency_at_all():
    for component in _components(np.full((2, 2, 2, 4, 30), np.nan), np.arange(30)):
        assert component.value is None
        assert "takes any time" in component.note


def test_missing_latencies_do_not_bias_components():
    logs, _ = _made(0, replicas=4, stages=3, steps=40)
    logs[:, 1, 0] = np.nan  # One stage's forward.
    found = _by_name(logs)
    assert found["residual"].value == pytest.approx(0.01, rel=0.1)
    assert found["worker_step"].value == pytest.approx(0.006, rel=0.3)
    logs[:, :, 0], logs[:, 1:] = np.nan, np.nan  # All but one op of each microbatch.
    found = _by_name(logs)
    assert found["residual"].value is None
    assert found["worker_step"].value is None
    both = np.hypot(0.03, 0.01)
    assert found["microbatch"].value == pytest.approx(both, rel=0.15)
    assert "with the residual of its op" in found["microbatch"].note
    logs[..., 7] = np.nan  # A step of which nothing is left.
    assert _by_name(logs)["microbatch"].value == pytest.approx(both, rel=0.15)


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


def test_the_latencies_are_those_of_the_trace(stages):
    seen = stages[0]
    assert seen.off < 1e-9
    assert np.argwhere(seen.latencies["optimizer"] > 1).tolist() == [[1, 0, 0, 30]]


def test_the_stall_and_the_sleep_are_taken_out(stages):
    seen, clean, _ = stages
    for kind, body in clean.body.items():
        stalls = np.argwhere(np.isnan(body) & ~np.isnan(seen.latencies[kind])).tolist()
        assert stalls == [[1, 0, 0, 30]] * (kind == "optimizer")
    (law,) = clean.stalls
    assert law.kernel == "optimizer"
    assert law.parameters["median_s"] == pytest.approx(_STALL, rel=0.05)
    assert [kind for kind, x in clean.constant.items() if x.any()] == ["forward-compute"]
    seconds = clean.constant["forward-compute"].reshape(-1)
    np.testing.assert_allclose(seconds, [0, 0, _SLEEP, 0], rtol=0.4)
    assert all(np.all(x == 1) for x in clean.positions.values())


def test_the_means_and_the_spread_are_split(stages):
    _, _, split = stages
    assert split.apart.spread["residual"] == pytest.approx(_SPREAD, rel=0.1)
    means = split.mean["backward-compute"].reshape(-1)
    np.testing.assert_allclose(means, [0.2, 0.2, 0.2 * _SLOW, 0.2], rtol=0.01)


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
    assert means[-1].mean_s == clean.constant["forward-compute"].max()
