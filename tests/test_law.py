"""The law of the step time, and how often its intervals hold the truth."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

import prism_jax as prism
from benchmarks import intervals
from prism_jax import load_law, merge_laws, save_law, simulate
from prism_jax._estimate import Estimate, rounded
from prism_jax.law import LEVELS, Allocations, counted, errors_by_group, group_sums, law_of
from prism_jax.law._errors import pooled_errors, scatters
from prism_jax.law._histogram import MOST_EXACT, merge_histograms
from prism_jax.program import Network, Variability
from prism_jax.schedule import OneFOneB
from prism_jax.step import GROUPS

from .helpers import lognormal, made_law, pipeline_program


_ABOUT = {"program": "", "keys": ((0, 0),), "compile_s": 0.0, "run_s": 1.0}


def _law(steps):
    """A law of given steps, each decided by a replica sample of its own, the slowest first."""
    steps = np.asarray(steps, float)
    order, n = np.argsort(-steps, kind="stable"), len(steps)
    part = counted(steps, n, np)
    arrays = steps[order], None, order // 2 % GROUPS
    sums = group_sums(*arrays, part.centre, part.quantiles, (1, GROUPS), xp=np)
    (errors,) = errors_by_group(jax.tree.map(lambda x: x[None], sums))
    return law_of(part, n, errors, requested=n, effective_samples=float(n), **_ABOUT)


def test_moments_and_quantiles_equal_numpy():
    steps = 1.6 + np.random.default_rng(0).gamma(3.0, 0.01, 2**18)
    law = _law(steps)
    assert law.mean == pytest.approx(steps.mean(), rel=1e-12)
    assert law.std == pytest.approx(steps.std(), rel=1e-9)
    for q in (0.0, 1e-4, 0.01, 0.3, 0.5, 0.95, 0.9999, 1.0):
        assert law.quantile(q) == pytest.approx(np.quantile(steps, q), abs=1e-3 * law.std)
    for t in (1.601, 1.63, 1.7, 1.5, 2.5):
        assert law.cdf(t) == pytest.approx(np.mean(steps <= t), abs=1e-4)
        assert law.exceedance(t) == pytest.approx(np.mean(steps > t), abs=1e-4)
    many = law.quantile(np.array([0.1, 0.9]))
    assert list(np.asarray(many)) == [law.quantile(0.1), law.quantile(0.9)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_steps_are_kept_as_they_are_and_many_to_four_millionths(dtype):
    """Whatever lies how far out, and in whatever parts they are counted."""
    rng = np.random.default_rng(0)
    steps = (1 + 0.01 * rng.standard_normal((4, 40_000))).astype(dtype)
    steps[rng.random(steps.shape) < 0.04] += 100
    steps[0, 0] = 1e6
    parts = [_law(x).histogram for x in steps]
    levels = np.linspace(0, 1, 1_001)
    for of_part, exact in zip(parts, steps, strict=True):
        np.testing.assert_allclose(of_part.quantile(levels), np.quantile(exact, levels), rtol=1e-7)
    merged, exact = merge_histograms(parts), np.sort(steps.ravel())
    assert exact.size > MOST_EXACT
    assert merged.num_samples == merged.counts.sum() == exact.size
    assert merged == merge_histograms([merge_histograms(parts[2:]), *parts[:2]])
    assert merged == _law(steps.ravel()).histogram
    low = merged.quantile(levels) / exact[np.floor(levels * (exact.size - 1)).astype(int)]
    assert np.all((low > 1 - 4e-6) & (low < 1 + 1e-3))
    assert merged.cdf(np.array([0.5, 50.0, 2e6])).tolist() == [0, np.mean(exact < 50), 1]


def test_intervals_cover():
    """The 95 % intervals of mean, std and quantiles over 300 repetitions."""
    rng = np.random.default_rng(3)
    hits = np.zeros(5)
    for _ in range(300):
        law = _law(rng.standard_normal(2_000) + 10)
        hits += [
            law.mean_interval()[0] <= 10 <= law.mean_interval()[1],
            law.std_interval()[0] <= 1 <= law.std_interval()[1],
            law.quantile_interval(0.5)[0] <= 10 <= law.quantile_interval(0.5)[1],
            law.quantile_interval(0.05)[0] <= 8.3551 <= law.quantile_interval(0.05)[1],
            law.quantile_interval(0.95)[0] <= 11.6449 <= law.quantile_interval(0.95)[1],
        ]
    # Three standard errors of a coverage of 0.95.
    assert np.all(np.abs(hits / 300 - 0.95) < 0.038)


def test_support_is_twice_the_groups_that_have_steps_beyond():
    law = _law(np.random.default_rng(0).standard_normal(10_000) + 10)
    assert law.support(0.95) == law.support(0.05) == 2 * GROUPS
    # Of five steps beyond, no more than five groups have one.
    assert 0 < law.support(0.9995) <= 10
    assert np.isnan(law.quantile_interval(0.9995)[0])
    assert "independent replica samples lie beyond it" in str(law.why_unknown(0.9995))


def test_one_step_says_nothing_about_the_spread():
    law = _law([2.5])
    assert law.mean == law.quantile(0.9) == 2.5
    for interval in (law.mean_interval(), law.std_interval(), law.quantile_interval(0.5)):
        assert all(np.isnan(x) for x in interval)


def test_a_constant_step_time():
    law = _law(np.full(1000, 3.5))
    assert law.mean == 3.5
    assert law.std == 0
    assert law.quantile(0.3) == pytest.approx(3.5)
    assert law.quantile_interval(0.95) == (3.5, 3.5)


def test_samples_of_a_law_follow_it():
    law = made_law()
    times = law.sample(20_000, jax.random.key(1))
    assert kstest(law.cdf(times), "uniform").pvalue > 0.01
    np.testing.assert_array_equal(law.sample(20_000, jax.random.PRNGKey(1)), times)
    assert not np.array_equal(law.sample(20_000, jax.random.key(2)), times)


def test_probabilities_of_many_times_are_those_of_each():
    law = _law(np.random.default_rng(0).gamma(3.0, 0.1, 30_000))
    times = np.array([[0.0, 1e-9, 0.1, 0.31], [0.5, 2.0, 99.0, float(law.histogram.times[-1])]])
    assert np.asarray(law.cdf(times)).tolist() == [
        [law.cdf(t) for t in row] for row in times.tolist()
    ]
    assert np.asarray(law.exceedance(times)).shape == (2, 4)
    assert isinstance(law.cdf(0.3), float)
    assert isinstance(law.exceedance(np.float64(0.3)), float)


def test_laws_are_compared_and_printed():
    steps = np.random.default_rng(0).gamma(3.0, 0.1, 3_000)
    law, same, few = _law(steps), _law(steps), _law(steps[:10])
    assert law == same == dataclasses.replace(law, run_s=9.0)
    assert hash(law) == hash(same)
    more = dataclasses.replace(law.histogram, counts=law.histogram.counts + 1)
    wider = dataclasses.replace(law.errors, mean=2 * law.errors.mean)
    apart = Allocations((1.0, 2.0), 0.1)
    others = [{"histogram": more}, {"errors": wider}, {"allocations": apart}]
    for other in (few, *(dataclasses.replace(law, **change) for change in others), 3, None):
        assert law != other
    copied = dataclasses.replace(few.errors, levels=few.errors.levels.copy())
    assert few == dataclasses.replace(few, errors=copied)
    assert len({law, same, few}) == 2
    lines = repr(law).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    low, high = law.quantile_interval(0.95)
    assert f" {rounded(float(law.quantile(0.95)), (high - low) / 2)} " in repr(law)
    assert repr(few).count("unknown") == 6


def test_an_estimate_has_an_interval():
    assert Estimate(2.0, 0.5).interval() == pytest.approx((2 - 0.97998, 2 + 0.97998), abs=1e-5)
    low, high = Estimate(2.0, 0.5, degrees=15.0).interval(0.9)
    assert high - 2 == 2 - low == pytest.approx(0.5 * 1.7530504, rel=1e-7)  # Of tables of t.
    assert all(np.isnan(x) for x in Estimate(2.0, float("nan")).interval())
    assert str(Estimate(2.0, 0.0123)) == "2.000 +- 0.012"
    assert str(Estimate(2.0, float("nan"))) == "2"


def _program(num_replicas, sigma=0.05):
    variability = Variability(residual={"gemm": lognormal(sigma)})
    return pipeline_program(OneFOneB(3, 6), variability=variability, num_replicas=num_replicas)


def test_merged_laws_are_the_law_of_all_steps():
    program = _program(4)
    laws = [simulate(program, num_samples=30_000, key=jax.random.key(k)) for k in range(4)]
    merged = merge_laws(laws)
    assert merged.num_samples == 120_000
    assert merged.mean == pytest.approx(np.mean([law.mean for law in laws]), rel=1e-12)
    squares = np.mean([law.errors.mean**2 for law in laws])
    assert merged.errors.mean == pytest.approx(np.sqrt(squares / 4), rel=1e-12)
    assert merged.quantile(1.0) == max(law.quantile(1.0) for law in laws)
    quantiles = np.array([law.quantile(0.95) for law in laws], float)
    assert abs(merged.quantile(0.95) - quantiles.mean()) < quantiles.std()
    other = simulate(_program(4, sigma=0.06), num_samples=1_000, key=jax.random.key(7))
    with pytest.raises(ValueError, match="different programs"):
        merge_laws([laws[0], other])


def test_a_saved_law_is_read_back(tmp_path):
    law = simulate(_program(2), num_samples=5_000, key=jax.random.key(0))
    save_law(law, tmp_path / "law.npz")
    again = load_law(tmp_path / "law.npz")
    assert again == law
    assert (again.compile_s, again.run_s) == (law.compile_s, law.run_s)
    assert [file.name for file in tmp_path.iterdir()] == ["law.npz"]
    (tmp_path / "bad.npz").write_text("no law")
    with pytest.raises(ValueError, match="is not a law"):
        load_law(tmp_path / "bad.npz")
    whole = (tmp_path / "law.npz").read_bytes()
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * len(whole), size=60).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "bad.npz").write_bytes(damaged)
        with contextlib.suppress(ValueError):  # Nothing else is raised.
            assert load_law(tmp_path / "bad.npz").mean == law.mean
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="is not a law"):
        load_law(tmp_path / "other.npz")


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
    low, high = errors.interval_levels(np.array([0.95]), 0.95)[:, 0]
    for p, sign in ((low, 1), (high, -1)):
        error, _ = errors.of_level(p)
        reach = Estimate(0.0, float(error), 40.0).interval()[1]
        assert np.isclose(p + sign * reach, 0.95)
    # An interval of nearly no confidence lies beside a skewed estimate.
    for skewness, sign in ((0.2, -1), (-0.2, 1)):
        skewed = dataclasses.replace(errors, level_skewness=errors.level_skewness + skewness)
        ends = skewed.interval_levels(np.array([0.95]), 0.001)[:, 0]
        assert ends[0] < ends[1]
        assert min(sign * (end - 0.95) for end in ends) > 0
    knee = dataclasses.replace(errors, levels=np.where(LEVELS > 0.96, 0.0, errors.levels))
    assert knee.interval_levels(np.array([0.95]), 0.95)[1, 0] < high
