"""Two laws: of one step on GPUs that are drawn anew, and of the steps of one allocation."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import binom

import prism_jax as prism
from prism_jax.engine import gpu_set_factors, prepare, simulate
from prism_jax.engine._reference import reference_steps
from prism_jax.law import Allocations, counted, law_of, merge_allocations, merge_chunks
from prism_jax.program import Network, Variability
from prism_jax.schedule import OneFOneB

from .helpers import lognormal, made_law, pipeline_program


def _program(schedule, num_replicas=1, gpu_sigma=0.02):
    variability = Variability(residual={"gemm": lognormal(0.01)}, rank=lognormal(gpu_sigma))
    return pipeline_program(schedule, variability=variability, num_replicas=num_replicas)


@pytest.mark.slow
def test_one_worker_has_the_spread_of_its_factor_between_allocations():
    """Closed form: a step is `A (F + B)`, with the factor `A` of the GPU."""
    allocations, steps = 100, 500
    options = {"num_samples": allocations * steps, "key": jax.random.key(0)}
    law = simulate(_program(OneFOneB(1, 1)), allocations=allocations, **options)
    within = 0.01 * np.sqrt(1 + 4) * np.sqrt(1 + 0.02**2)
    found = law.allocations
    assert found.std == pytest.approx(within, rel=0.02)
    between = np.std(found.means, ddof=1)
    assert between == pytest.approx(3 * 0.02, rel=4 / np.sqrt(2 * allocations))
    assert law.std == pytest.approx(np.hypot(between, found.std), rel=0.02)
    # The mean of ten thousand steps scatters as the GPUs do, not a hundredth of a step's spread.
    assert law.run_mean_std(10_000) == pytest.approx(between, rel=0.01)
    assert law.run_mean_std(10_000) > 90 * law.std / np.sqrt(10_000)
    low, high = law.mean_interval()
    assert (high - low) / 2 == pytest.approx(1.984 * between / np.sqrt(allocations), rel=0.02)


def test_sets_of_gpus_differ_by_their_factors_and_not_by_the_noise_of_their_steps():
    """Closed form: means differ as the factors of one GPU do, however noisy the steps are."""
    laws = Variability(
        residual={"gemm": lognormal(0.05)}, rank=lognormal(0.02), step=lognormal(0.05)
    )
    program = pipeline_program(OneFOneB(1, 1), variability=laws)
    sets, seeds = 64, 24
    spreads = [
        gpu_set_factors(prepare(program, jax.random.key(seed)), sets, 3).std(ddof=1)
        for seed in range(seeds)
    ]
    # The noise of three steps adds more than the factors have.
    error = 0.02**2 * np.sqrt(2 / sets) * (1 + 0.05**2 / 3 / 0.02**2)
    variance = np.mean(np.square(spreads))
    assert abs(variance - 0.02**2) < 4 * error / np.sqrt(seeds)


def test_sets_of_gpus_of_several_replicas_differ_as_allocations_do():
    program = _program(OneFOneB(2, 4), num_replicas=8)
    law = simulate(program, num_samples=20_000, key=jax.random.key(1), allocations=400)
    factors = gpu_set_factors(prepare(program, jax.random.key(2)), 400, 4)
    between = law.run_mean_std(10**9) / law.mean
    assert factors.std() == pytest.approx(between, rel=4 / np.sqrt(400))
    assert factors.mean() == pytest.approx(1, rel=1e-9)


def test_steps_of_allocations_are_congested_as_often_as_the_network_is():
    """Closed form: a step sends for 1 s, or for 3 s with the probability 0.1, independently of the
    other steps of its allocation.
    """
    laws = Variability(rank=lognormal(0.01), network=Network(jnp.asarray(0.1), jnp.asarray(3.0)))
    options = {"network_links": ("network",), "variability": laws, "num_replicas": 2}
    program = pipeline_program(OneFOneB(2, 1), send_recv=1.0, **options)
    number, each = 500, 4
    law = simulate(program, num_samples=number * each, key=jax.random.key(3), allocations=number)
    calm, longer = law.quantile(0.5), law.quantile(1.0) - law.quantile(0.5)
    congested = (np.array(law.allocations.means) - calm) * each / longer
    whole = np.round(congested).astype(int)
    assert np.abs(congested - whole).max() < 0.2
    counts = np.bincount(whole, minlength=each + 1)
    expected = number * binom.pmf(np.arange(each + 1), each, 0.1)
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected) + 1)
    assert law.exceedance(calm + longer / 2) == pytest.approx(whole.mean() / each, rel=1e-9)


def _intervals(law):
    """Of the mean, the standard deviation, p5, p50 and p95."""
    quantiles = [law.quantile_interval(q) for q in (0.05, 0.5, 0.95)]
    return np.array([law.mean_interval(), law.std_interval(), *quantiles])


def _laws_of_allocations(number: int, steps_each: int = 50, between: float = 1.0):
    """The laws of steps on sets of GPUs, of a spread `between` them and of 0.3 on each."""
    rng = np.random.default_rng(0)
    steps = 10 + between * rng.standard_normal((number, 1))
    steps = steps + 0.3 * rng.standard_normal((number, steps_each))
    about = {"requested": steps_each, "effective_samples": 1.0, "program": "", "keys": ((0, 0),)}
    for mine in steps:
        part = counted(mine, len(mine), np)
        yield law_of(part, len(mine), made_law().errors, **about, compile_s=0.0, run_s=0.0)


@ft.cache
def _population():
    """Laws of many allocations, and that of all their steps."""
    laws = [*_laws_of_allocations(500)]
    return laws, merge_chunks(laws)


@pytest.mark.parametrize(
    ("allocations", "given"), [(4, "m"), (20, "ms"), (100, "ms 5 "), (400, "ms595")]
)
def test_intervals_are_those_of_as_many_samples_as_there_are_allocations(allocations, given):
    """Allocations are drawn, with replacement, from some whose law is known exactly."""
    population, law = _population()
    truth = [law.mean, law.std, *(law.quantile(q) for q in (0.05, 0.5, 0.95))]
    known = np.array([mark != " " for mark in given.ljust(5)])
    rng, repetitions, held = np.random.default_rng(allocations), 150, np.zeros(5)
    for _ in range(repetitions):
        some = [population[i] for i in rng.integers(500, size=allocations)]
        low, high = _intervals(merge_allocations(some)).T
        np.testing.assert_array_equal(low == low, known)
        held += (low <= truth) & (truth <= high)
    # Three standard errors of a coverage of 0.95.
    assert np.all(np.abs(held[known] / repetitions - 0.95) < 0.054)


def test_two_steps_on_each_allocation_tell_them_apart():
    """A step of two lies nearer their own mean than the mean of more."""
    law = merge_allocations([*_laws_of_allocations(2_000, 2, between=0.2)])
    assert law.allocations.std == pytest.approx(0.3, rel=4 / np.sqrt(2 * 2_000))
    means = np.hypot(0.2, 0.3 / np.sqrt(2))
    error = 2 * means**2 / np.sqrt(2 * 2_000)
    assert law.run_mean_std(10**9) ** 2 == pytest.approx(0.2**2, abs=4 * error)


@pytest.mark.parametrize(("between", "remembered"), [(0.01, 0.8), (0.2, 0.9), (0.01, 0.0)])
def test_the_mean_of_a_run_whose_steps_resemble_those_before(between, remembered):
    """Directly: runs of an AR(1) process, each of which has a level of its own."""
    rng = np.random.default_rng(0)
    runs, num_steps, within = 4_000, 1_000, 0.7
    noise = rng.standard_normal((num_steps, runs)) * np.sqrt(1 - remembered**2)
    noise[0] /= np.sqrt(1 - remembered**2)  # Stationary from the start.
    total = np.sum(lfilter([1], [1, -remembered], noise, axis=0), axis=0)
    means = between * rng.standard_normal(runs) + within * total / num_steps
    # The law of as many independent steps on each of 50 sets of GPUs as `made_law` has.
    law, scatter = made_law(), rng.standard_normal(50)
    scatter *= np.sqrt(between**2 + within**2 / 10) / np.std(scatter, ddof=1)
    law = dataclasses.replace(law, allocations=Allocations(tuple(scatter.tolist()), within))
    assert law.num_samples == 500
    time = (1 + remembered) / (1 - remembered)
    found = law.run_mean_std(num_steps, autocorrelation_time=time)
    assert found == pytest.approx(means.std(), rel=4 / np.sqrt(2 * runs))
    # No mean scatters more than a step.
    assert law.run_mean_std(2, autocorrelation_time=1e6) == law.run_mean_std(1)


@pytest.mark.slow
def test_kept_and_redrawn_allocations_have_the_same_law():
    program = _program(OneFOneB(4, 8), num_replicas=8)
    anew = reference_steps(program, 40_000, 0)
    kept = simulate(program, num_samples=40_000, key=jax.random.key(2), allocations=200)
    error = np.hypot(anew.std() / np.sqrt(len(anew)), kept.errors.mean)
    assert abs(anew.mean() - kept.mean) < 4 * error
    assert kept.std == pytest.approx(anew.std(), rel=4 / np.sqrt(2 * 200))
    # But runs of kept GPUs differ far more than those of GPUs drawn anew at each step.
    assert kept.run_mean_std(10_000) > 50 * anew.std() / np.sqrt(10_000)


def test_allocations_are_kept_with_the_law(tmp_path):
    options = {"num_samples": 1_000, "key": jax.random.key(0), "allocations": 10}
    law = simulate(_program(OneFOneB(1, 2)), **options)
    prism.save_law(law, tmp_path / "law.npz")
    assert prism.load_law(tmp_path / "law.npz").run_mean_std(100) == law.run_mean_std(100)
    one = merge_allocations([made_law()])
    assert np.isnan(_intervals(one)).all()
    prism.save_law(one, tmp_path / "one.npz")
    assert prism.load_law(tmp_path / "one.npz").why_unknown() == one.why_unknown() is not None


def test_merged_laws_keep_their_allocations():
    program = _program(OneFOneB(1, 1))
    laws = [
        simulate(program, num_samples=40 * steps, key=jax.random.key(steps), allocations=40)
        for steps in (50, 100)
    ]
    merged = prism.merge_laws(laws)
    (first, of_first), (second, of_second) = (
        (x.allocations.means, x.allocations.std) for x in laws
    )
    assert merged.allocations.means == first + second
    assert merged.allocations.std == pytest.approx(np.sqrt((of_first**2 + 2 * of_second**2) / 3))
    plain = simulate(program, num_samples=100, key=jax.random.key(0))
    assert prism.merge_laws([merged, plain]).allocations is None
