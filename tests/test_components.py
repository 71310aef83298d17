"""Components of made latencies, whose truth is known."""

import numpy as np
import pytest

from prism_jax.analysis import components


_TRUTH = {"rank": 0.02, "step": 0.01, "step_autocorrelation": 0.9, "worker_step": 0.006}
_TRUTH |= {"microbatch": 0.03, "residual": 0.01, "stall_rate": 1e-4}


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
    "64 workers, 200 steps": ({"replicas": 8, "stages": 8, "steps": 200}, 12),
    "unbalanced": ({"replicas": 4, "stages": 2, "steps": 60, "missing": True}, 60),
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_components_are_recovered(shape):
    """Each within four of the standard errors that repetitions show, and without a bias but of
    what a short trace cannot tell; the errors that are stated are those that repetitions show.
    `pytest -s` prints the biases."""
    arguments, repetitions = _SHAPES[shape]
    found = [components(*_made(seed, **arguments)) for seed in range(repetitions)]
    for i, (name, truth) in enumerate((c.name, _TRUTH[c.name]) for c in found[0]):
        values = np.array([each[i].value for each in found])
        stated = np.array([each[i].standard_error for each in found])
        scatter = np.std(values, ddof=1)
        print(f"{shape}: {name} {values.mean() / truth - 1:+.1%}, scatter {scatter / truth:.1%}")
        outside = np.mean(np.abs(values - truth) >= 4 * scatter)
        bias = abs(values.mean() - truth) / (scatter / np.sqrt(repetitions))
        if name in ("step", "step_autocorrelation"):
            # Now and then a short trace shows no memory at all.
            assert outside <= 0.05, name
            assert -0.25 < values.mean() / truth - 1 < 0.05, name
        else:
            assert outside == 0, name
            assert bias < 4, name
        typical = np.subtract(*np.quantile(values, [0.75, 0.25])) / 1.349
        assert 0.4 < np.median(stated) / typical < 2.5, name


def test_longer_traces_are_less_biased():
    """The autocorrelation is too low in short traces, and right in long ones."""
    means = []
    for steps, repetitions in ((50, 30), (400, 10)):
        found = [
            components(*_made(100 + i, replicas=4, stages=2, steps=steps))
            for i in range(repetitions)
        ]
        (place,) = [i for i, c in enumerate(found[0]) if c.name == "step_autocorrelation"]
        means.append(np.mean(np.array([each[place].value for each in found], float)))
    assert means[0] < means[1] < 0.92
    assert means[1] == pytest.approx(0.9, abs=0.03)


def test_what_data_cannot_tell_is_said():
    logs, _ = _made(0, replicas=1, stages=1, steps=30)
    by_name = {c.name: c for c in components(logs, 10 * np.arange(30))}
    assert by_name["rank"].value is None
    assert "one replica" in by_name["rank"].note
    assert by_name["worker_step"].value is None
    assert by_name["step_autocorrelation"].value is None
    assert "neighbouring" in by_name["step_autocorrelation"].note
    assert by_name["microbatch"].value == pytest.approx(0.03, rel=0.3)
    few = {c.name: c for c in components(logs[..., :2], np.arange(2))}
    assert few["step"].value is None
