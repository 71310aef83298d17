import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from prism_jax.analysis import (
    CRPS,
    CVaR,
    Exceedance,
    Mean,
    Quantile,
    Std,
    Wasserstein,
    bandwidth,
    estimate,
    step_times,
)
from prism_jax.analysis._check import check_steps
from prism_jax.engine import simulate, simulated_steps
from prism_jax.engine._reference import reference_steps

from .helpers import refusal, rich_program


# What is changed, and by how much for a central difference.
_PARAMETERS = {
    "mean": (lambda p: p.latencies.mean, 0.01),
    "gemm": (lambda p: p.variability.residual["gemm"].sigma, 0.005),
    "send_recv": (lambda p: p.variability.residual["send_recv"].sigma, 0.03),
    "rank": (lambda p: p.variability.rank.sigma, 0.004),
    "step": (lambda p: p.variability.step.sigma, 0.002),
    "microbatch": (lambda p: p.variability.microbatch.sigma, 0.004),
    "slowdown": (lambda p: p.variability.network.slowdown, 0.3),
    "probability": (lambda p: p.variability.network.probability, 0.02),
    "stall rate": (lambda p: p.variability.stalls["gemm"].rate, 5e-5),
    "stall size": (lambda p: p.variability.stalls["gemm"].size.median, 0.1),
}
_OBJECTIVES = [Mean(), Std(), Quantile(0.9), CVaR(0.8), Exceedance(20.5)]
_OBJECTIVES += [against(np.linspace(18.0, 24.0, 40)) for against in (CRPS, Wasserstein)]


def test_every_parameter_has_a_finite_derivative():
    """By all parts that a program can have; the slow test below compares them with differences."""
    gradient = eqx.filter_grad(estimate)(
        rich_program(2), Mean(), num_samples=512, key=jax.random.key(0)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    for name, (get, _) in _PARAMETERS.items():
        assert np.sum(np.abs(get(gradient))) > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 16])
def test_gradients_equal_differences(num_replicas):
    """Every parameter and objective, against central differences with common random numbers."""
    program = rich_program(num_replicas)
    seeds = range(4)
    found, expected = {}, {}
    for objective in _OBJECTIVES:
        for seed in seeds:
            gradient = eqx.filter_grad(estimate)(
                program, objective, num_samples=16_000, key=jax.random.key(seed)
            )
            for name, (get, _) in _PARAMETERS.items():
                slope = float(np.sum(get(gradient)))
                found.setdefault((objective, name), []).append(slope)
    for name, (get, step) in _PARAMETERS.items():
        for seed in seeds:
            laws = []
            for sign in (1, -1):
                changed = eqx.tree_at(get, program, get(program) + sign * step)
                laws.append(_steps(changed, seed))
            for objective in _OBJECTIVES:
                up, down = (objective.value(steps) for steps in laws)
                expected.setdefault((objective, name), []).append((up - down) / (2 * step))
    for pair, slopes in found.items():
        differences = expected[pair]
        noise = np.hypot(np.std(slopes, ddof=1), np.std(differences, ddof=1)) / np.sqrt(len(seeds))
        gap = abs(np.mean(slopes) - np.mean(differences))
        # Kernel smoothing and the finite step bias both by a few per cent of the largest slope.
        largest = max(abs(np.mean(differences)), abs(np.mean(slopes)))
        assert gap < 5 * noise + 0.04 * largest, (pair, slopes, differences)


def _steps(program, seed):
    return simulated_steps(program, num_samples=64_000, key=jax.random.key(1000 + seed)).steps


def test_the_value_is_that_of_the_law():
    program = rich_program(4)
    law = simulate(program, num_samples=9_000, key=jax.random.key(2))
    arguments = {"num_samples": 9_000, "key": jax.random.key(3)}
    error = np.sqrt(2) * law.errors.mean
    assert float(estimate(program, Mean(), **arguments)) == pytest.approx(law.mean, abs=4 * error)
    error = np.sqrt(2) * law.errors.std
    assert float(estimate(program, Std(), **arguments)) == pytest.approx(law.std, abs=4 * error)
    quantile, halves = (
        float(estimate(program, Quantile(0.9), **arguments)),
        law.quantile_interval(0.9),
    )
    assert quantile == pytest.approx(law.quantile(0.9), abs=np.sqrt(2) * np.diff(halves)[0])
    counted = float(law.exceedance(20.5))
    noise = np.sqrt(2 * counted * (1 - counted) / 9_000)
    found = float(estimate(program, Exceedance(20.5), **arguments))
    assert found == pytest.approx(counted, abs=3 * noise)


def test_estimates_are_of_the_steps_that_are_simulated_with_the_same_key():
    """Where these are so many that samples are plain."""
    options = {"num_samples": 26_000, "key": jax.random.key(2)}
    for program in (rich_program(1), rich_program(4)):
        law = simulate(program, **options)
        assert float(estimate(program, Mean(), **options)) == pytest.approx(law.mean, rel=1e-6)
        assert float(estimate(program, Std(), **options)) == pytest.approx(law.std, rel=1e-5)


def test_step_times_have_the_law_of_steps_in_an_order_that_tells_nothing():
    program, key = rich_program(4), jax.random.PRNGKey(2)
    times = np.asarray(step_times(program, 4_096, key=key))
    steps = reference_steps(program, 4_096, 0)
    assert abs(times.mean() - steps.mean()) < 4 * np.sqrt(2 / 4_096) * steps.std()
    for q in (0.05, 0.5, 0.95):
        error = np.sqrt(2 * q * (1 - q) / 4_096)
        assert abs(np.mean(times <= np.quantile(steps, q)) - q) < 4 * error
    apart = [np.corrcoef(times[lag:], times[: len(times) - lag])[0, 1] for lag in (1, 2, 1024)]
    assert np.abs(apart).max() < 4 / np.sqrt(len(times))
    assert np.abs(np.corrcoef(times, np.arange(len(times)))[0, 1]) < 4 / np.sqrt(len(times))


def test_figures_of_step_times_have_the_derivatives_of_estimate():
    """By every parameter, those that act through the weights of steps included."""
    program, options = rich_program(4), {"num_samples": 256, "key": jax.random.key(0)}
    value, gradient = eqx.filter_value_and_grad(estimate)(program, Std(), **options)
    own = eqx.filter_value_and_grad(lambda p: step_times(p, **options).std())(program)
    np.testing.assert_allclose(own[0], value, rtol=1e-12)
    for found, expected in zip(*map(jax.tree.leaves, (own[1], gradient)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)
    assert gradient.variability.stalls["gemm"].rate != 0
    assert gradient.variability.network.probability != 0


@pytest.mark.slow
def test_the_derivative_with_respect_to_all_means_is_the_step_itself():
    """Euler's identity for a program without stalls, whose sizes are in seconds of their own."""
    program = rich_program(8)
    quiet = eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, jnp.zeros(()))
    value, gradient = eqx.filter_value_and_grad(estimate)(
        quiet, Mean(), num_samples=4_000, key=jax.random.key(0)
    )
    total = float(jnp.sum(quiet.latencies.mean * gradient.latencies.mean))
    assert total == pytest.approx(float(value), rel=1e-9)


@pytest.mark.slow
def test_single_precision_gives_the_same_derivatives():
    """With kernels of microseconds, whose cubes single precision cannot hold in seconds."""
    program = rich_program(4)
    program = eqx.tree_at(
        lambda p: (p.latencies.mean, p.variability.stalls["gemm"].size.median),
        program,
        (1e-6 * program.latencies.mean, 1e-6 * jnp.ones(())),
    )
    single = jax.tree.map(
        lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, program
    )
    gradients = [
        eqx.filter_grad(estimate)(p, Mean(), num_samples=4_000, key=jax.random.key(0))
        for p in (program, single)
    ]
    for name, (get, _) in _PARAMETERS.items():
        double, found = (np.asarray(get(gradient), float) for gradient in gradients)
        scale = max(np.abs(double).max(), 1e-7)
        np.testing.assert_allclose(found, double, atol=0.02 * scale, err_msg=name)


@pytest.mark.slow
def test_differences_of_programs_have_derivatives():
    program = rich_program(2)

    def gain(program):
        faster = eqx.tree_at(lambda p: p.latencies.mean, program, 0.9 * program.latencies.mean)
        arguments = {"num_samples": 2_000, "key": jax.random.key(0)}
        return estimate(program, Mean(), **arguments) - estimate(faster, Mean(), **arguments)

    value, gradient = eqx.filter_value_and_grad(gain)(program)
    assert value > 0
    assert np.all(np.isfinite(gradient.latencies.mean))


def test_tracers_are_refused_with_advice():
    program = rich_program(1)

    @eqx.filter_jit
    def traced(program):
        return estimate(program, Mean(), num_samples=10, key=jax.random.key(0))

    refusal(lambda: traced(program), "use `sample_replica_ends`")


@pytest.mark.parametrize("objective", [Mean(), Std(), Quantile(0.3), CVaR(0.9), Exceedance(0.5)])
def test_influence_and_slope_are_derivatives(objective):
    """Of the figure, with respect to a common shift and to the weights of the samples."""
    steps = np.random.default_rng(0).gamma(4.0, 0.2, 200_000)
    slope = objective.slope(steps, bandwidth(steps, objective))
    shift = 0.01
    direct = (objective.value(steps + shift) - objective.value(steps - shift)) / (2 * shift)
    assert np.sum(slope) == pytest.approx(direct, rel=0.03, abs=1e-9)
    influence = objective.influence(steps, bandwidth(steps, objective))
    assert abs(np.mean(influence)) < 1e-9 * max(1, np.abs(influence).max())
    # The standard error that the influence gives, against repetitions.
    repeats = np.random.default_rng(1).gamma(4.0, 0.2, (200, 5_000))
    scatter = np.std([objective.value(row) for row in repeats])
    claimed = np.std(influence) / np.sqrt(5_000)
    assert claimed == pytest.approx(scatter, rel=0.2)


def test_influence_on_a_quantile_of_few_steps_is_not_smoothed_away():
    """The bandwidth is that of 8,192 steps; the law is a normal one, as exact as its quantiles."""
    steps = norm.ppf((np.arange(2**18) + 0.5) / 2**18)
    influence = Quantile(0.95).influence(steps, bandwidth(steps, Quantile(0.95), 2**13))
    exact = np.sqrt(0.95 * 0.05) / norm.pdf(norm.ppf(0.95))
    assert np.std(influence) == pytest.approx(exact, rel=1e-3)


def test_figures_have_the_names_that_commands_give_them():
    figures = Mean(), Std(), Quantile(0.95), Quantile(0.999), CVaR(0.95), Exceedance(1.7)
    names = ["mean", "std", "p95", "p99.9", "cvar95", "P(> 1.7 s)"]
    assert [*map(str, figures)] == names
    with pytest.raises(ValueError, match=r"^1 step does .* p95; simulate at least 60\.$"):
        check_steps(Quantile(0.95), 1)
    check_steps(Quantile(0.95), 60)
