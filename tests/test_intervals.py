"""Confidence intervals are as wide as estimates scatter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import prism_jax as prism
from prism_jax._estimate import Estimate
from prism_jax.engine import Plain, prepare
from prism_jax.engine._run import all_draws
from prism_jax.latency import AbstractLatency, LogNormal
from prism_jax.law._errors import pooled_errors
from prism_jax.program import Variability
from prism_jax.step._errors import IndependentErrors

from .helpers import made_law


def _program(num_replicas: int) -> prism.Program:
    """A chain whose steps vary more by their own factor than by the replica that decides them."""
    law: AbstractLatency = LogNormal(jnp.asarray(1.0), jnp.asarray(0.05))
    return prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(
            residual={"gemm": law}, step=LogNormal(jnp.asarray(1.0), jnp.asarray(0.05))
        ),
        num_replicas=num_replicas,
    )


def test_intervals_cover_where_few_samples_decide_many_steps():
    program = _program(64)
    laws = [
        prism.simulate(program, num_samples=4_000, key=jax.random.key(seed), sampling="plain")
        for seed in range(60)
    ]
    # Beyond p95 of the slowest of 64 lie three samples of a replica: that is not enough.
    for level in (0.05, 0.5):
        ends = np.array([law.quantile_interval(level) for law in laws])
        scatter = np.std([float(law.quantile(level)) for law in laws], ddof=1)
        half = np.mean(ends[:, 1] - ends[:, 0]) / 2
        # 1.3 times what the scatter calls for, which 60 laws tell within a fifth; too narrow alike.
        assert 0.7 < half / (1.96 * scatter) < 1.3 * 1.2


def test_more_steps_of_many_replicas_are_divided_into_stretches_that_reach_the_tail():
    run = dataclasses.replace(prepare(_program(1024), jax.random.key(0)), sampling=Plain())
    for number in (10**6, 10**8, 10**9):
        draws = all_draws(run, number)
        assert sum(draw.steps for draw in draws) == number
        reach = np.sqrt(2 * 1024 * number)
        assert min(draw.steps for draw in draws) > 0.5 * min(reach, number)
    assert len(all_draws(run, 10**8)) > 10


def test_the_law_is_known_where_few_samples_decide_without_a_step_factor():
    """The grid is set by a pilot drawn as the run is: plainly drawn, it would miss the law."""
    law: AbstractLatency = LogNormal(jnp.asarray(1.0), jnp.asarray(0.1))
    program = prism.compile_graph(
        [prism.Op(0.1, kind="gemm", after=[i - 1] if i else []) for i in range(8)],
        variability=Variability(residual=dict[str, AbstractLatency](gemm=law)),
        num_replicas=65_536,
    )
    laws = [
        prism.simulate(program, num_samples=100_000, key=jax.random.key(seed), sampling=sampling)
        for seed, sampling in enumerate(("importance", "plain"))
    ]
    median = float(laws[0].quantile(0.5))
    assert np.isfinite(median)
    assert abs(float(laws[0].exceedance(median)) - 0.5) < 0.05
    # One grid for all laws of a program, so that they can be merged.
    assert prism.merge_laws(laws).num_samples == 200_000


def test_intervals_miss_as_often_on_either_side():
    """Means of few exponential contributions: where the mean is low so is its standard error, and
    intervals of equal sides miss nearly always on one.
    """
    values = np.random.default_rng(0).exponential(size=(20_000, 40))
    missed = {"equal sides": np.zeros(2), "skewness": np.zeros(2)}
    for some in values:
        mean = float(np.mean(some))
        error, skewness, _ = IndependentErrors(40).of_mean(some - mean)
        for name, known in (("equal sides", 0.0), ("skewness", skewness)):
            low, high = Estimate(mean, error, skewness=known).interval()
            missed[name] += (low > 1.0, high < 1.0)
    below, above = missed["equal sides"] / len(values)
    assert above > 5 * below
    assert above > 0.06
    assert np.all(missed["skewness"] / len(values) < 0.04)


def test_a_share_has_the_interval_of_a_share():
    """The quantile's interval of independent steps, where the distribution function is binomial:
    against Wilson's interval of the share beyond, which inverts the score.
    """
    n, q, z = 400, 0.95, 1.96
    steps = np.arange(n) + 0.5
    errors = IndependentErrors(n)
    found, support = errors.of_level(steps, n * q)
    assert np.isclose(support, 20)
    assert np.isclose(found.error**2, q * (1 - q) / n)
    low, high = Estimate(q, found.error, skewness=found.skewness).interval()
    middle, half = q + z**2 / (2 * n), z * np.sqrt(q * (1 - q) / n + (z / n) ** 2 / 4)
    wilson = (np.array([-half, half]) + middle) / (1 + z**2 / n)
    np.testing.assert_allclose([low, high], wilson, atol=0.25 * found.error)
    assert q - low > 1.2 * (high - q)


def test_the_skewness_of_laws_put_together_is_that_of_their_mean():
    law = made_law()
    one = dataclasses.replace(
        law.errors, mean_skewness=0.4, level_skewness=np.full_like(law.errors.levels, -0.6)
    )
    pooled = pooled_errors([one] * 4, np.full(4, 0.25))
    assert np.isclose(pooled.mean, one.mean / 2)
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
    from prism_jax.law import LEVELS

    knee = dataclasses.replace(errors, levels=np.where(LEVELS > 0.96, 0.0, errors.levels))
    assert knee.interval_levels(0.95, 0.95)[1] < high


def test_degrees_of_freedom_leave_out_the_part_explained_by_the_estimate():
    """Student's degrees of normal contributions, and of shares, whose error the share tells."""
    rng = np.random.default_rng(0)
    n = 100_000
    values = rng.standard_normal(n)
    found = IndependentErrors(n).of_mean(values - values.mean())
    # A fourth power of 3, of which the square of the variance is not noise either: 2 n / 3.
    assert np.isclose(found.degrees, 2 * n / 3, rtol=0.05)
    small = (1e-8 * (values - values.mean())).astype(np.float32)
    assert np.isclose(IndependentErrors(n).of_mean(small).degrees, found.degrees, rtol=1e-3)
    skewed = rng.exponential(size=n)
    found = IndependentErrors(n).of_mean(skewed - skewed.mean())
    # 9 less the square of a skewness of 2.
    assert np.isclose(found.degrees, 2 * n / 5, rtol=0.1)
    share, _ = IndependentErrors(n).of_level(np.arange(n), 0.9 * n)
    assert np.isclose(share.degrees, 2 * n, rtol=0.01)
