"""Distances of laws equal those of SciPy, and their derivatives those of differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import prism_jax as prism

from .helpers import made_law


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (64, 64), (100, 41)])
def test_the_wasserstein_distance_of_samples_is_that_of_scipy(n, m):
    rng = np.random.default_rng(n)
    one, two = rng.gamma(4.0, 0.2, n), np.round(rng.normal(1.0, 0.3, m), 1)  # with ties
    expected = stats.wasserstein_distance(one, two)
    assert prism.wasserstein(one, two) == pytest.approx(expected, rel=1e-12)
    assert prism.wasserstein(two, one) == pytest.approx(expected, rel=1e-12)
    assert prism.wasserstein(one, one) == 0
    assert prism.wasserstein(one, one + 0.25) == pytest.approx(0.25, rel=1e-12)
    in_jax = prism.wasserstein(jnp.asarray(one, jnp.float32), two)
    assert float(in_jax) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_derivative_of_wasserstein_distance_equals_differences():
    rng = np.random.default_rng(0)
    one, two = rng.normal(1.0, 0.1, 12), rng.normal(1.05, 0.2, 30)
    found = jax.grad(prism.wasserstein)(jnp.asarray(one, jnp.float32), two)
    step = 1e-6
    expected = [
        float(prism.wasserstein(one + e, two) - prism.wasserstein(one - e, two)) / 2 / step
        for e in step * np.eye(12)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # The objective has the same, and an influence whose mean is zero.
    objective = prism.Wasserstein(two)
    np.testing.assert_allclose(objective.slope(one, 0.0), expected, atol=1e-8)


def test_its_influence_is_the_derivative_by_a_weight():
    rng = np.random.default_rng(1)
    one, two = rng.normal(1.0, 0.1, 9), rng.normal(1.05, 0.2, 20)
    influence = prism.Wasserstein(two).influence(one, 0.0)
    more = 1e-6
    for at in range(9):
        weights = np.full(9, 1 / 9) * (1 - more) + more * (np.arange(9) == at)
        change = stats.wasserstein_distance(one, two, weights) - prism.wasserstein(one, two)
        assert influence[at] == pytest.approx(change / more, abs=1e-5)


def test_wasserstein_distance_of_laws_equals_that_of_their_steps():
    rng = np.random.default_rng(2)
    one, two = rng.gamma(4.0, 0.2, 5000), rng.gamma(4.0, 0.25, 5000)
    expected = stats.wasserstein_distance(one, two)
    laws = made_law(one), made_law(two)
    assert prism.wasserstein(*laws) == pytest.approx(expected, rel=0.01)
    assert prism.wasserstein(laws[0], two) == pytest.approx(expected, rel=0.01)


def test_whole_numbers_of_jax_are_not_rounded():
    assert float(prism.wasserstein(jnp.array([1, 2]), jnp.array([3, 5]))) == pytest.approx(2.5)
    assert float(prism.wasserstein(jnp.array([1]), np.array([3.7]))) == pytest.approx(2.7)


@pytest.mark.parametrize("bad", [[], [[1.0]], [np.nan], 1.0, [1j], ["a"]])
def test_samples_must_be_finite_step_times(bad):
    with pytest.raises(ValueError, match="must be a list of finite step times"):
        prism.wasserstein(np.asarray(bad), np.ones(1))
