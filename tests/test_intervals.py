"""Confidence intervals are as wide as estimates scatter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from benchmarks import intervals
from prism_jax._estimate import Estimate
from prism_jax.law import LEVELS
from prism_jax.law._errors import pooled_errors, scatters
from prism_jax.program import Network, Variability
from prism_jax.schedule import OneFOneB

from .helpers import lognormal, made_law, pipeline_program


@pytest.mark.parametrize("num_replicas", [16, 128])
def test_intervals_hold_the_truth(num_replicas):
    """Of an integral, over 100 keys, which tell a coverage within 0.022, one standard error."""
    program, truth = intervals.sinks_that_tie(num_replicas), intervals.truth_of_sinks(num_replicas)
    rows = {row["figure"]: row for row in intervals.cell_rows(program, truth, 100, 4_096)}
    for name, row in rows.items():
        assert row["withheld"] == 0
        least, widest = (0.88, 1.45) if name in ("std", "p99") else (0.91, 1.3)
        assert row["coverage"] >= least, row
        assert 0.9 < row["width"] < widest, row
    assert 0.93 < np.mean([row["coverage"] for row in rows.values()]) < 0.97


def test_the_interval_of_std_knows_that_regimes_are_dealt():
    """How many steps the network is slow in is set, so it adds nothing to the scatter."""
    laws = Variability(
        residual={"gemm": lognormal(0.05)}, network=Network(jnp.asarray(0.02), jnp.asarray(3.0))
    )
    options = {"num_replicas": 64, "network_links": ("network",), "variability": laws}
    program = pipeline_program(OneFOneB(2, 4), send_recv=0.5, **options)
    found = [
        prism.simulate(program, num_samples=4_000, key=jax.random.key(seed)) for seed in range(40)
    ]
    half = np.mean([np.diff(law.std_interval())[0] for law in found]) / 2
    # Forty laws tell it within a quarter.
    assert 0.7 < half / (1.96 * np.std([law.std for law in found], ddof=1)) < 1.4


def test_the_law_is_known_with_very_many_replicas():
    ops = [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)]
    laws = Variability(residual={"gemm": lognormal(0.1)})
    program = prism.compile_graph(ops, variability=laws, num_replicas=65_536)
    found = [
        prism.simulate(program, num_samples=100_000, key=jax.random.key(seed), sampling=sampling)
        for seed, sampling in enumerate(("importance", "plain"))
    ]
    median = float(found[0].quantile(0.5))
    assert abs(float(found[0].exceedance(median)) - 0.5) < 0.05
    # One grid for all laws of a program, so that they can be merged.
    assert prism.merge_laws(found).num_samples == 200_000


def _scatter_of_mean(values: np.ndarray) -> list[float]:
    """Error, skewness and degrees of freedom of the mean of independent values."""
    return scatters((values[:, None] - values.mean()) / len(values))[0].tolist()


def test_intervals_miss_as_often_on_either_side():
    """Means of few exponential contributions: where the mean is low so is its standard error, and
    intervals of equal sides miss nearly always on one.
    """
    missed = np.zeros((2, 2))
    values = np.random.default_rng(0).exponential(size=(10_000, 40))
    for sample in values:
        error, skewness, _ = _scatter_of_mean(sample)
        for row, known in enumerate((0.0, skewness)):
            estimate = Estimate(float(sample.mean()), error, skewness=known)
            low, high = estimate.interval()
            missed[row] += (low > 1.0, high < 1.0)
    (below, above), by_skewness = missed / len(values)
    assert above > max(5 * below, 0.06)
    assert np.all(by_skewness < 0.04)


def test_a_share_has_the_interval_of_a_share():
    """Against Wilson's interval of a binomial share, which inverts the score."""
    n, q, z = 400, 0.95, 1.96
    error, skewness, _ = _scatter_of_mean((np.arange(n) < n * q).astype(float))
    assert np.isclose(error**2, q * (1 - q) / n)
    low, high = Estimate(q, error, skewness=skewness).interval()
    middle, half = q + z**2 / (2 * n), z * np.sqrt(q * (1 - q) / n + (z / n) ** 2 / 4)
    wilson = (np.array([-half, half]) + middle) / (1 + z**2 / n)
    np.testing.assert_allclose([low, high], wilson, atol=0.25 * error)
    assert q - low > 1.2 * (high - q)


def test_degrees_of_freedom_leave_out_the_part_explained_by_the_estimate():
    rng, n = np.random.default_rng(0), 100_000
    # A fourth power of 3, of which the square of the variance is not noise either: 2 n / 3.
    assert np.isclose(_scatter_of_mean(rng.standard_normal(n))[2], 2 * n / 3, rtol=0.05)
    # 9 less the square of a skewness of 2.
    assert np.isclose(_scatter_of_mean(rng.exponential(size=n))[2], 2 * n / 5, rtol=0.1)


def test_the_skewness_of_laws_put_together_is_that_of_their_mean():
    errors = made_law().errors
    skewed = np.full_like(errors.levels, -0.6)
    errors = dataclasses.replace(errors, mean_skewness=0.4, level_skewness=skewed)
    pooled = pooled_errors([errors] * 4, np.full(4, 0.25))
    assert np.isclose(pooled.mean, errors.mean / 2)
    assert np.isclose(pooled.mean_skewness, 0.2)
    np.testing.assert_allclose(pooled.level_skewness, -0.3)
    assert pooled.std_skewness == 0


def test_the_interval_of_a_quantile_ends_where_the_distribution_function_s_does():
    """Its width there counts: beyond the knee of a law nearly nothing is unknown."""
    errors = made_law().errors
    low, high = errors.interval_levels(0.95, 0.95)
    for p, sign in ((low, 1), (high, -1)):
        error, _ = errors.of_level(p)
        reach = Estimate(0.0, error, 40.0).interval()[1]
        assert np.isclose(p + sign * reach, 0.95)
    # An interval of nearly no confidence lies beside a skewed estimate.
    for skewness, sign in ((0.2, -1), (-0.2, 1)):
        skewed = dataclasses.replace(errors, level_skewness=errors.level_skewness + skewness)
        ends = skewed.interval_levels(0.95, 0.001)
        assert ends[0] < ends[1]
        assert min(sign * (end - 0.95) for end in ends) > 0
    knee = dataclasses.replace(errors, levels=np.where(LEVELS > 0.96, 0.0, errors.levels))
    assert knee.interval_levels(0.95, 0.95)[1] < high
