import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_jax.engine import _sampling, simulate
from prism_jax.program import Stall, Variability
from prism_jax.replica import make_plan, sample_replica_ends
from prism_jax.schedule import GPipe, OneFOneB
from prism_jax.step import _reservoir, _selection
from prism_jax.step._reservoir import Replicas
from prism_jax.step._selection import select

from .helpers import claimed_over_scatter, lognormal, pipeline_program, rich_program


# What each leaves out.
_CASES = {
    "independent": {"rank": None, "step": None, "microbatch": None, "network": None, "stalls": {}},
    "factors": {"network": None, "stalls": {}},
    "network": {"stalls": {}},
    "stalls": {"network": None},
    "everything": {},
}


def _program(num_replicas, case):
    # Equal stages tie: every rank ends at nearly the same time, and any may decide the step.
    sigmas = {"gemm": 0.03, "send_recv": 0.3, "reduce_scatter": 0.2}
    residual = {kind: lognormal(sigma) for kind, sigma in sigmas.items()}
    return rich_program(num_replicas, schedule=OneFOneB(4, 6), residual=residual, **_CASES[case])


_FAST = {(1, "independent"), (64, "independent")}


@pytest.mark.parametrize(
    ("num_replicas", "case"),
    [
        pytest.param(*pair, marks=() if pair in _FAST else pytest.mark.slow)
        for pair in it.product((1, 64), _CASES)
    ],
)
def test_the_vector_rule_equals_explicit_replicas(case, num_replicas):
    program = _program(num_replicas, case)
    steps = 40_000 if num_replicas == 1 else 8_000
    explicit = simulate(program, num_samples=steps, key=jax.random.key(1), replicas="explicit")
    vector = simulate(program, num_samples=200_000, key=jax.random.key(2))
    exact = simulate(program, num_samples=200_000, key=jax.random.key(3), replicas="exact")
    noise = np.hypot(explicit.errors.mean, vector.errors.mean)
    # The vector rule is good to 0.13 % of the mean; the exact rule has no error of its own.
    assert abs(vector.mean - explicit.mean) < 4 * noise + 1.3e-3 * explicit.mean
    assert abs(exact.mean - explicit.mean) < 5 * noise + 1e-4 * explicit.mean
    for q in (0.05, 0.5, 0.95):
        low, high = explicit.quantile_interval(q)
        tolerance = 2 * (high - low) + 1.3e-3 * explicit.mean
        assert abs(vector.quantile(q) - explicit.quantile(q)) < tolerance
        assert abs(exact.quantile(q) - explicit.quantile(q)) < tolerance


@pytest.mark.slow
def test_the_intervals_cover_explicit_replicas():
    """At R = 64, over many seeds, the 95 % interval of p95 holds that of a long explicit run."""
    program = _program(64, "factors")
    truth = simulate(program, num_samples=40_000, key=jax.random.key(100), replicas="explicit")
    target = truth.quantile(0.95)
    slack = (truth.quantile_interval(0.95)[1] - truth.quantile_interval(0.95)[0]) / 2
    covered = 0
    seeds = 40
    for seed in range(seeds):
        law = simulate(program, num_samples=20_000, key=jax.random.key(seed))
        low, high = law.quantile_interval(0.95)
        covered += low - slack <= target <= high + slack
    assert covered >= scipy.stats.binom.ppf(0.001, seeds, 0.95)


@pytest.mark.slow
def test_intervals_are_as_wide_as_repetitions_scatter():
    program = _program(16, "everything")
    laws = [simulate(program, num_samples=8_000, key=jax.random.key(s)) for s in range(40)]
    for ratio in claimed_over_scatter(laws).values():
        assert 0.7 < ratio < 1.5


@pytest.mark.slow
def test_too_few_samples_for_a_tail_are_said_to_be():
    law = simulate(
        _program(4096, "factors"), num_samples=4_000, key=jax.random.key(0), sampling="plain"
    )
    assert law.support(0.99) < 20
    for interval in (law.quantile_interval(0.99), law.mean_interval(), law.std_interval()):
        assert all(np.isnan(x) for x in interval)


def test_with_one_replica_each_sample_is_used_once():
    """With R = 1 and no more than the pipeline, a step is one replica sample, used once."""
    program = pipeline_program(
        GPipe(2, 4), variability=Variability(residual={"gemm": lognormal(0.1)})
    )
    samples = 20_000
    ends = sample_replica_ends(program, jnp.arange(samples, dtype=jnp.uint32), jax.random.key(5))
    law = simulate(program, num_samples=samples, key=jax.random.key(5))
    direct = np.max(np.asarray(ends), axis=0)
    assert law.mean == pytest.approx(direct.mean(), rel=1e-5)
    assert law.std == pytest.approx(direct.std(), rel=1e-3)
    assert law.errors.mean == pytest.approx(direct.std() / np.sqrt(samples), rel=0.05)
    for q in (0.1, 0.5, 0.9):
        assert law.quantile(q) == pytest.approx(np.quantile(direct, q), abs=0.01 * law.std)


@pytest.mark.slow
def test_stalls_occur_at_their_rate_and_add_their_size():
    stalls = {"gemm": Stall(jnp.asarray(1e-3), lognormal(0.0))}
    program = pipeline_program(OneFOneB(1, 10), variability=Variability(stalls=stalls))
    law = simulate(program, num_samples=50_000, key=jax.random.key(0), replicas="explicit")
    quiet = 10 * 3.0
    rate = 20 * 1e-3
    width = (law.histogram.edges[1] - law.histogram.edges[0]) / 2**16
    assert law.quantile(0.5) == pytest.approx(quiet, abs=width)
    assert law.mean == pytest.approx(quiet + rate, abs=4 * law.errors.mean)
    assert law.exceedance(quiet + 0.5) == pytest.approx(1 - np.exp(-rate), abs=0.003)
    weighted = simulate(program, num_samples=50_000, key=jax.random.key(0))
    assert weighted.mean == pytest.approx(quiet + rate, rel=1e-4)
    # Half of the samples are of the few steps with stalls.
    assert weighted.effective_samples == pytest.approx(50_000 * np.exp(rate) / 2, rel=0.01)
    # Ranks are stratified, so a probability is right to within about one step of all.
    assert weighted.exceedance(quiet + 1.5) == pytest.approx(
        scipy.stats.poisson.sf(1, rate), abs=1.5 / 50_000
    )


@pytest.mark.parametrize("rate", [0.0, 19.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_number_of_stalls_is_poisson(rate, dtype):
    """With dozens of strata too, whose powers and factorials alone overflow."""
    stalls = {"gemm": Stall(jnp.asarray(rate / 20), lognormal(0.0))}
    program = pipeline_program(OneFOneB(1, 10), variability=Variability(stalls=stalls))
    narrow = [x.astype(dtype) if eqx.is_array(x) else x for x in jax.tree.leaves(program)]
    program = jax.tree.unflatten(jax.tree.structure(program), narrow)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def mean(rate):
        changed = eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, rate)
        counts = make_plan(changed).tables.stall_counts
        return jnp.sum(counts * jnp.arange(len(counts), dtype=counts.dtype)), counts

    (_, counts), slope = mean(program.variability.stalls["gemm"].rate)
    found = np.asarray(counts)
    most = max(stratum.stalls for stratum in program.strata)
    assert not found[most + 1 :].any()
    expected = scipy.stats.poisson.pmf(np.arange(most), rate)
    np.testing.assert_allclose(found[:most], expected, rtol=1e-4, atol=1e-30)
    assert rate < 5 or most > 15
    np.testing.assert_allclose(slope, 20, rtol=1e-3)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-3, 0.03, 1.0])
def test_chances_of_few_stalls_keep_their_digits(rate):
    """In single precision, of the last stratum too, which stands for itself and more; and their
    derivatives, against differences of the law in double precision.
    """
    calls = 20
    single = jnp.asarray(rate / calls, jnp.float32)
    with jax.enable_x64(False):
        stalls = {"gemm": Stall(single, lognormal(0.0))}
        program = pipeline_program(OneFOneB(1, 10), variability=Variability(stalls=stalls))

        @jax.jit  # Which leaves out all that the chances do not need.
        def chances(rate):
            given = eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, rate)
            return make_plan(given).tables.stall_counts

        counts, derivative = jax.jvp(chances, (single,), (jnp.ones_like(single),))
    most = max(stratum.stalls for stratum in program.strata)
    number = np.arange(most)
    given = calls * float(single)

    def law(rate):
        return np.append(
            scipy.stats.poisson.pmf(number, rate), scipy.stats.poisson.sf(most - 1, rate)
        )

    assert counts.dtype == np.float32
    np.testing.assert_allclose(counts[: most + 1], law(given), rtol=5e-6)
    step = 1e-4 * given
    slope = calls * (law(given + step) - law(given - step)) / (2 * step)
    # That of one stall is zero at a rate of one.
    allowed = 1e-5 * (np.abs(slope) + calls * law(given))
    assert np.all(np.abs(np.asarray(derivative)[: most + 1] - slope) <= allowed)


def test_the_jackknife_equals_resampling():
    """`influences` against the spread over resamples with Poisson weights; of one replica, whose
    mean step is linear in the weights, against what independent samples add to a mean.
    """
    rng = np.random.default_rng(0)
    n, R, steps = 400, 8, 20_000
    score = rng.standard_normal(n)
    kept = Replicas(
        ids=np.arange(n, dtype=np.uint32),
        ends=score[:, None],
        score=score,
        stratum=np.zeros(n, np.int32),
        likelihood=np.ones(n, np.float32),
        counts=np.array([n]),
    )
    uniform = (np.arange(steps) + 0.5) / steps
    weights = np.full(n, 1 / n)
    selection = select(kept, weights, np.ones(n, bool), R)
    position = selection.pick(uniform)
    times = score[selection.order][position]
    total = np.bincount(position, (times - times.mean()) / steps, len(selection.order))
    found = np.sqrt(selection.influences(total)[0])
    means = []
    for _ in range(400):
        resampled = rng.poisson(1.0, n).astype(float)
        again = select(kept, resampled / resampled.sum(), np.ones(n, bool), R)
        means.append(score[again.order][again.pick(uniform)].mean())
    assert found == pytest.approx(np.std(means), rel=0.15)
    one = select(kept, weights, np.ones(n, bool), 1)
    centred = np.sort(score)[::-1] - score.mean()
    variance, third, fourth = one.influences(centred / n)
    assert variance == pytest.approx(np.sum(centred**2) / n**2)
    assert third == pytest.approx(np.sum(centred**3) / n**3)
    assert fourth == pytest.approx(np.sum(centred**4) / n**4)


@pytest.mark.parametrize("num_replicas", [1, 16])
def test_a_long_run_is_right_although_most_samples_are_forgotten(num_replicas, monkeypatch):
    """With room for few samples, against the same samples all kept, in NumPy."""
    for room in (_reservoir, _selection):
        monkeypatch.setattr(room, "RESERVOIR", 2_000)
        monkeypatch.setattr(room, "EXTREMES", 1_000)
    monkeypatch.setattr(_sampling, "RESERVOIR", 2_000)
    program = pipeline_program(
        OneFOneB(2, 3),
        variability=Variability(residual={"gemm": lognormal(0.2)}),
        num_replicas=num_replicas,
    )
    samples = 60_000
    laws = [simulate(program, num_samples=samples, key=jax.random.key(s)) for s in range(6)]
    ends = sample_replica_ends(program, jnp.arange(480_000, dtype=jnp.uint32), jax.random.key(99))
    direct = np.max(np.asarray(ends), axis=0).reshape(-1, num_replicas).max(axis=1)
    noise = np.std(direct) / np.sqrt(len(direct))
    gaps = [(law.mean - direct.mean()) / np.hypot(law.errors.mean, noise) for law in laws]
    assert abs(np.mean(gaps)) < 4 / np.sqrt(len(laws))
    assert np.mean([law.std for law in laws]) == pytest.approx(np.std(direct), rel=0.03)
    for q in (0.1, 0.5, 0.95):
        found = np.mean([float(law.quantile(q)) for law in laws])
        expected = float(np.quantile(direct, q))
        assert found == pytest.approx(expected, abs=0.05 * float(np.std(direct)))


def test_a_rate_of_stalls_that_was_zero_when_compiled():
    stalls = {"gemm": Stall(jnp.zeros(()), lognormal(0.0))}
    program = pipeline_program(OneFOneB(1, 10), variability=Variability(stalls=stalls))

    def with_rate(rate):
        return eqx.tree_at(lambda p: p.variability.stalls["gemm"].rate, program, jnp.asarray(rate))

    rare = simulate(with_rate(1e-4), num_samples=20_000, key=jax.random.key(0), sampling="plain")
    # Ranks are stratified, so the share of steps with a stall is right to within two steps.
    assert rare.mean == pytest.approx(30 + 20 * 1e-4, abs=2 / 20_000)
    with pytest.raises(ValueError, match="compile it with the new rate"):
        simulate(with_rate(0.05), num_samples=10, key=jax.random.key(0), sampling="plain")
    with pytest.raises(ValueError, match="stall rate of `gemm`"):
        simulate(with_rate(-0.05), num_samples=10, key=jax.random.key(0), sampling="plain")


def test_ties_beyond_the_reservoir_keep_their_weight():
    """Half of two million scores tie, more than the reservoir keeps apart."""
    from prism_jax.step import Chances, Reservoir, effective_samples
    from prism_jax.step._selection import sample_weights

    rng = np.random.default_rng(0)
    reservoir = Reservoir(1, 1, np.float32, 0, 2_000_000)
    for start in range(0, 2_000_000, 100_000):
        score = rng.integers(1, 3, 100_000).astype(np.float32)
        ids = np.arange(start, start + 100_000, dtype=np.uint32)
        ones = np.ones(100_000, np.float32)
        reservoir.add(ids, score[:, None], score, np.zeros(100_000, np.int32), ones)
    kept = reservoir.replicas()
    one = np.ones(1)
    chances = Chances(np.zeros(1, int), one, one, one)
    assert len(kept.ids) < 500_000
    assert effective_samples(chances, kept) == pytest.approx(2_000_000)
    weights = sample_weights(chances, kept)
    assert weights.sum() == pytest.approx(1)
    assert weights[kept.score == 2].sum() == pytest.approx(0.5, abs=0.005)


def test_effective_samples_are_of_the_full_weights():
    """By hand: the square of the sum of the weights over the sum of their squares."""
    from prism_jax.step import Chances, effective_samples
    from prism_jax.step._reservoir import Replicas

    def found(strata, likelihood, chances):
        n, zeros = len(strata), np.zeros(len(strata), np.float32)
        likelihood = np.array(likelihood, np.float32)
        counts = np.bincount(strata, minlength=len(chances.share))
        ids, strata = np.arange(n, dtype=np.uint32), np.array(strata, np.int32)
        kept = Replicas(ids, zeros[:, None], zeros, strata, likelihood, counts)
        return effective_samples(chances, kept)

    one = np.ones(1)
    alone = Chances(np.zeros(1, int), one, one, one)
    assert found([0] * 7, [1] * 7, alone) == pytest.approx(7)
    assert found([0] * 3, [1, 2, 3], alone) == pytest.approx(6**2 / 14)
    # No stall nine times in ten, but in three of eight samples only.
    share, probability = np.array([0.4, 0.6]), np.array([0.9, 0.1])
    stalls = Chances(np.zeros(2, int), share, probability / share, one)
    by_hand = 1 / (3 * (0.9 / 3) ** 2 + 5 * (0.1 / 5) ** 2)
    assert found([0, 1, 1, 0, 1, 1, 1, 0], [1] * 8, stalls) == pytest.approx(by_hand)
    weights = np.array([0.9 * 1 / 4, 0.9 * 3 / 4, 0.1 * 1 / 3, 0.1 * 2 / 3])
    assert found([0, 0, 1, 1], [1, 3, 1, 2], stalls) == pytest.approx(1 / np.sum(weights**2))
    # A network that is congested once in ten steps, in half of the samples.
    half = np.array([0.5, 0.5])
    network = Chances(np.arange(2), half, np.ones(2), np.array([0.9, 0.1]))
    assert found([0, 0, 1, 1], [1] * 4, network) == pytest.approx(1 / (0.9**2 / 2 + 0.1**2 / 2))
    # What was not drawn has no weight.
    assert found([0, 0, 0], [1] * 3, stalls) == pytest.approx(3)


def test_standard_errors_by_importance_sampling_equal_the_scatter():
    """By importance sampling every other sample is shifted. How many of each there are does not
    scatter: by the bootstrap and by the jackknife, the standard error of the probability of a tail
    is its scatter over 600 runs.
    """
    from prism_jax.step._reservoir import Replicas, resample_factors
    from prism_jax.step._selection import select

    rng, number, shift = np.random.default_rng(0), 2000, 3.0
    stratum, counts = np.zeros(number, np.int32), np.array([number])
    found, errors = [], []
    for _ in range(600):
        ids = np.arange(number, dtype=np.uint32) + rng.integers(200_000, dtype=np.uint32)
        z = rng.normal(size=number) + shift * (ids % 2)
        likelihood = 1 / (0.5 + 0.5 * np.exp(shift * z - shift**2 / 2))
        kept, slow = Replicas(ids, z[:, None], z, stratum, likelihood, counts), z > shift

        def late(weights, slow=slow):  # That one replica is late, and that one of 64 is.
            tail = weights[slow].sum() / weights.sum()
            return np.array([tail, 1 - (1 - tail) ** 64])

        found.append(late(likelihood))
        again = [late(likelihood * factors) for factors in resample_factors(kept)]
        weights, variances = likelihood / likelihood.sum(), []
        for replicas in (1, 64):
            picks = select(kept, weights, np.ones(number, bool), replicas)
            variances.append(picks.influences(picks.picked * slow[picks.order])[0])
        errors.append([np.std(again, axis=0, ddof=1), np.sqrt(variances)])
    expected = np.std(found, axis=0)
    np.testing.assert_allclose(np.mean(errors, axis=0), [expected] * 2, rtol=0.08)
