"""Distances of laws equal those of SciPy, and their derivatives those of differences."""

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from scipy import stats

import prism_jax as prism
from prism_jax._misc import runs_of
from prism_jax.analysis._cells import cells_of, figures_by_counts
from prism_jax.calibration._observe import observe_runs
from prism_jax.law import crps, quantiles
from prism_jax.plot._axes import measured_steps

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


class _Frame(dict):
    """As much of a data frame as pandas and polars have in common."""

    columns = property(list)

    def to_numpy(self):
        raise NotImplementedError


@pytest.mark.parametrize("frame", [pl.DataFrame, _Frame])
def test_a_data_frame_is_taken_for_its_steps(frame):
    """By a law's distance, its score, an objective, a plot, a calibration and a diagnosis."""
    steps = np.random.default_rng(0).gamma(9.0, 0.1, 40)
    law, key = made_law(steps), jax.random.PRNGKey(0)
    given = frame({"step_time_s": steps, "other": list(range(40))})
    assert prism.wasserstein(law, given) == prism.wasserstein(law, steps)
    assert prism.score(law, given, key=key) == prism.score(law, steps, key=key)
    assert prism.CRPS(given) == prism.CRPS(steps)
    assert np.array_equal(measured_steps(given), steps)
    of_two = frame({"step_time_s": steps, "run": ["b", "a"] * 20, "step": [*range(39, -1, -1)]})
    runs = [steps[-2::-2], steps[::-2]]
    for found, run in zip(runs_of(of_two), runs, strict=True):
        np.testing.assert_array_equal(found, run)
    assert observe_runs(of_two).measured("") == observe_runs(runs).measured("")
    assert observe_runs([given]).measured("") == observe_runs([steps]).measured("")
    with pytest.raises(ValueError, match=r"no column `step_time_s`; it has seconds\.$"):
        prism.score(law, frame({"seconds": steps}), key=key)
    with pytest.raises(ValueError, match=r"no numbers in its column `step_time_s`; give seconds"):
        prism.CRPS(frame({"step_time_s": ["a", "b"]}))


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


def _figures(law, predicted, measured) -> dict[str, float]:
    """The figures of a score, of each step by itself."""
    low, high = law.quantile(0.05), law.quantile(0.95)

    def ks(steps):
        at = np.concatenate([predicted, steps])
        below = (np.searchsorted(np.sort(x), at, "right") / len(x) for x in (predicted, steps))
        return np.max(np.abs(np.subtract(*below)))

    shift = np.median(predicted) - np.median(measured)
    return {
        "mean_error": law.mean / np.mean(measured) - 1,
        "p95_error": high / np.quantile(measured, 0.95) - 1,
        "std_ratio": law.std / np.std(measured, ddof=1) if np.ptp(measured) else np.nan,
        "ks": ks(measured),
        "ks_aligned": ks(measured + shift),
        "w1_s": stats.wasserstein_distance(predicted, measured),
        "crps_s": crps(predicted, measured),
        "coverage_90": np.mean((measured >= low) & (measured <= high)),
    }


def _measured(number):
    """Steps that are 1 % longer than those of the law, and a few that are much longer."""
    rng = np.random.default_rng(number)
    slow = np.where(rng.random(number) < 2e-3, 1 + rng.exponential(1.0, number), 1.0)
    return 1.01 * rng.gamma(100.0, 0.01, number) * slow


@pytest.fixture(scope="module")
def predicted():
    law = made_law(np.random.default_rng(0).gamma(100.0, 0.01, 5000))
    return law, quantiles(law)


@pytest.mark.parametrize("digits", [12, 2])
def test_resampled_counts_are_resampled_steps(predicted, digits):
    """Each step has a cell, so that counts have the figures of the steps picked, with ties
    or without; and counts of equally likely cells are those of picks with replacement.
    """
    measured = np.round(_measured(250), digits)
    (law, ordered), cells = predicted, cells_of(measured)
    assert (cells.counts == 1).all()
    figures = figures_by_counts(law, ordered, cells)
    assert figures(cells.counts) == pytest.approx(
        _figures(law, ordered, measured), rel=1e-9, abs=1e-12
    )
    for counts in np.random.default_rng(1).multinomial(250, np.full(250, 1 / 250), size=12):
        picked = np.repeat(np.sort(measured), counts)
        assert figures(counts) == pytest.approx(_figures(law, ordered, picked), rel=1e-9, abs=1e-12)
    alone = _figures(law, ordered, np.full(250, np.min(measured)))
    found = figures(np.bincount([0], minlength=250) * 250)
    assert found == pytest.approx(alone, rel=1e-9, abs=1e-12, nan_ok=True)


def test_figures_where_steps_of_the_law_are_equal_too(predicted):
    """Of a constant law, and of steps that were printed to a hundredth on both sides."""
    rounded = np.round(predicted[1], 2)
    for steps, measured in ((rounded, np.round(_measured(250), 2)), (np.ones(9), np.ones(20))):
        cells = cells_of(measured)
        ks = figures_by_counts(made_law(steps), np.sort(steps), cells)(cells.counts)["ks"]
        assert ks == pytest.approx(stats.ks_2samp(steps, measured)[0], abs=1e-12)


class _Counted:
    """A generator that says how many numbers it drew."""

    def __init__(self, rng, drawn):
        self._rng, self._drawn = rng, drawn

    def __getattr__(self, name):
        def draw(*arguments, **options):
            numbers = getattr(self._rng, name)(*arguments, **options)
            self._drawn.append(np.size(numbers))
            return numbers

        return draw


@pytest.mark.parametrize("number", [4096, 10_000])
def test_figures_and_noise_of_a_histogram_are_those_of_the_steps(predicted, number, monkeypatch):
    """The noise of a mean, of a share and of a quantile have closed forms, up to the error of a
    standard deviation from 400 resamples (3.5 %); figures differ by much less than their noise.
    """
    (law, ordered), measured = predicted, _measured(number)
    drawn: list[int] = []
    with monkeypatch.context() as counted:
        made = np.random.default_rng
        counted.setattr(np.random, "default_rng", lambda seed: _Counted(made(seed), drawn))
        found = prism.score(law, measured, key=jax.random.key(number))
    assert 0 < sum(drawn) <= 400 * 4096
    for name, exact in _figures(law, ordered, measured).items():
        assert abs(found.values[name] - exact) < 0.1 * found.noise[name], name
    mean, covered = np.mean(measured), found.values["coverage_90"]
    of_mean = law.mean / mean**2 * np.std(measured) / np.sqrt(number)
    assert found.noise["mean_error"] == pytest.approx(of_mean, rel=0.14)
    of_share = np.sqrt(covered * (1 - covered) / number)
    assert found.noise["coverage_90"] == pytest.approx(of_share, rel=0.14)
    squares = (measured - mean) ** 2
    of_spread = found.values["std_ratio"] * np.std(squares) / np.var(measured) / 2 / np.sqrt(number)
    assert found.noise["std_ratio"] == pytest.approx(of_spread, rel=0.25)
    direct = np.random.default_rng(0).choice(measured, (100, number))
    of_p95 = np.std(law.quantile(0.95) / np.quantile(direct, 0.95, axis=1))
    assert found.noise["p95_error"] == pytest.approx(of_p95, rel=0.3)


@pytest.mark.parametrize("number", [5000, 100_000, 1_000_000])
def test_more_steps_have_no_more_cells(number):
    cells = cells_of(np.linspace(1, 2, number))
    assert len(cells.counts) <= 4096
    assert cells.counts.sum() == number
    assert max(cells.counts) <= number / 2048 + 1
    assert max(cells.counts[0], cells.counts[-1]) == 1  # At the ends each step counts.
    assert np.average(cells.mean, weights=cells.counts) == pytest.approx(1.5, rel=1e-12)
