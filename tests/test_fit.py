"""Fits of parameters, against the values that made the steps, closed forms and bounds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_jax as prism
from prism_jax.analysis._descent import Descent, descend


_KEY = jax.random.key(0)
_SIGMAS = (0.05, 0.2)


def _sigmas(program):
    return [program.variability.residual[kind].sigma for kind in ("compute", "network")]


def _means(program):
    return program.latencies.mean


@pytest.fixture(scope="module")
def program():
    """Two ops of compute beside two of the network, then one more: the slower branch tells how much
    each of them varies.
    """
    compute, network = prism.latency.LogNormal(1.0, 0.05), prism.latency.LogNormal(0.9, 0.2)
    ops = [prism.Op(compute, kind="compute"), prism.Op(compute, kind="compute", after=[0])]
    ops += [prism.Op(network, kind="network"), prism.Op(network, kind="network", after=[2])]
    return prism.compile_graph([*ops, prism.Op(0.3, kind="optimizer", after=[1, 3])])


def test_sigmas_are_recovered_from_measured_steps(program):
    """The notebook `12_fit_measured_steps` shows five seeds."""
    measured = prism.step_times(program, 20_000, key=jax.random.key(1))
    start = eqx.tree_at(_sigmas, program, [jnp.asarray(0.08), jnp.asarray(0.12)])
    options = {"num_samples": 2_000, "key": jax.random.key(2), "num_steps": 60}
    fit = prism.fit_parameters(start, prism.CRPS(measured), _sigmas, **options)
    sigmas, errors = np.array(_sigmas(fit.program)), np.array(fit.errors)
    np.testing.assert_allclose(sigmas, _SIGMAS, rtol=0.05)
    assert np.all(np.abs(sigmas - _SIGMAS) < 4 * errors)
    assert np.all(errors < 0.03 * sigmas)
    assert fit.path[-1] < fit.path[0]
    assert len(fit.path) == fit.num_steps == 60


def test_standard_errors_are_those_of_a_mean():
    """Of an op that is to take three seconds on average: its error is what the op varies by, over
    the root of how often it was simulated for the last step, which 32 groups tell to 13 %.
    """
    program = prism.compile_graph([prism.Op(prism.latency.LogNormal(2.0, 0.3))])

    def away(times):
        return (times.mean() - 3.0) ** 2

    options = {"num_samples": 640, "key": _KEY, "optimizer": optax.adam(0.05), "num_steps": 20}
    fit = prism.fit_parameters(program, away, _means, **options)
    (mean,), (error,) = np.asarray(_means(fit.program)), np.asarray(fit.errors)
    assert abs(mean - 3.0) < 4 * error
    assert error == pytest.approx(3.0 * np.sqrt(np.expm1(0.3**2) / (32 * 640)), rel=0.4)


def test_what_has_no_single_minimum_has_no_errors(program):
    """A sum of means can be had in many ways."""

    def away(times):
        return (times.mean() - 2.5) ** 2

    options = {"num_samples": 64, "key": _KEY, "num_steps": 20, "common_draws": True}
    fit = prism.fit_parameters(program, away, _means, **options)
    assert np.isnan(fit.errors).all()
    assert fit.path[-1] < 0.1 * fit.path[0]


def test_a_fit_ends_at_its_bounds(program):
    """The less both vary, the less the step does."""
    options = {"num_samples": 64, "key": _KEY, "optimizer": optax.adam(0.5)}
    bounds = (0.04, [np.inf, 1.0])
    fit = prism.fit_parameters(program, prism.Std(), _sigmas, bounds=bounds, **options)
    np.testing.assert_allclose(_sigmas(fit.program), 0.04, rtol=1e-12)
    assert fit.num_steps < 50
    assert np.isnan(fit.errors).all()


def test_common_draws_leave_no_scatter(program):
    """Where nothing moves, the path is flat; with new draws it scatters."""
    options = {"num_samples": 64, "key": _KEY, "num_steps": 3, "optimizer": optax.sgd(1e-12)}
    paths = [
        prism.fit_parameters(program, prism.Mean(), _sigmas, common_draws=common, **options).path
        for common in (True, False)
    ]
    assert np.ptp(paths[0]) < 1e-9 < 1e-3 < np.ptp(paths[1])


def test_a_descent_ends_at_the_nearest_point_of_a_box():
    """Of a paraboloid about a point outside."""
    centre = np.array([2.0, -1.0, 0.25])

    def value_and_gradient(point, step):
        return float(np.sum((point - centre) ** 2)), 2 * (point - centre)

    def project(point):
        return np.clip(point, 0, 1)

    path = descend(value_and_gradient, np.full(3, 0.5), optax.sgd(0.4), 100, project)
    np.testing.assert_allclose(path.points[-1], np.clip(centre, 0, 1), atol=1e-7)
    assert len(path.points) < 100
    assert path.values == [float(np.sum((point - centre) ** 2)) for point in path.points]


def test_a_path_has_settled_where_it_goes_nowhere():
    """Noise about a constant is taken for a slope in 1 % of cases, in short and long paths, and a
    slope of a standard deviation in three steps never for noise.
    """

    def settled(values):
        return Descent([*values], values.tolist()).settled

    noise = np.random.default_rng(0).normal(size=(1000, 200))
    for length in (8, 200):
        assert 0.98 < np.mean([*map(settled, noise[:, :length])]) < 0.999
    assert not any(map(settled, noise - np.arange(200) / 3))
    assert [settled(np.zeros(length)) for length in (3, 4)] == [False, True]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"where": lambda p: []}, "`where` picks nothing"),
        ({"where": lambda p: p.num_ops}, "not an array of floats"),
        ({"where": lambda p: p.latencies.mean[:1]}, "not part of the program"),
        ({"start": 0.0}, "start from positive values"),
        ({"bounds": (0.1, 1.0)}, "must be at least 0 and hold them"),
        ({"bounds": (-1.0, 1.0)}, "must be at least 0"),
        ({"bounds": (0.0, [1.0])}, "must be a pair"),
        ({"objective": lambda times: times.mean() * jnp.nan}, "The objective is nan"),
        ({"objective": prism.Exceedance(99.0)}, "is 0; give a threshold"),
        ({"num_steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_sentence(program, changed, words):
    start = jnp.asarray(changed.pop("start", 0.05))
    options = {"objective": prism.Std(), "where": _sigmas, "num_samples": 64, "key": _KEY} | changed
    with pytest.raises(ValueError, match=words) as refused:
        prism.fit_parameters(eqx.tree_at(_sigmas, program, [start, start]), **options)
    assert "\n" not in str(refused.value)
