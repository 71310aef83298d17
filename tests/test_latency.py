import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.optimize as so
import scipy.stats as st
from jax.flatten_util import ravel_pytree

import prism_jax.latency as pl
from prism_jax._misc import subclasses
from prism_jax.host import on_host
from prism_jax.latency._scores import expectation, log_ndtr, ndtri_exp

from .helpers import by_numpy


SCORES = np.array([-8.0, -5.5, -3.0, -1.0, -0.2, 0.0, 0.3, 1.0, 2.0, 3.5, 5.5, 8.0])


def _truncated(location, std):
    return st.truncnorm(-location / std, np.inf, loc=location, scale=std)


def _gamma(mean, cv):
    return st.gamma(1 / cv**2, scale=mean * cv**2)


def _column(*values):
    """Parameters of several cases of a family, to compile it once; scores are the other axis."""
    return np.array(values)[:, None]


TWINS = {
    "normal": (
        pl.Normal(_column(2.0, 1.0, 0.0), _column(0.04, 0.8, 1.5)),
        [st.norm(2.0, 0.04), _truncated(1.0, 0.8), _truncated(0.0, 1.5)],
    ),
    "lognormal": (
        pl.LogNormal(_column(2.0, 1.0, 1.0), _column(0.02, 0.3, 1.2)),
        [st.lognorm(0.02, scale=2.0), st.lognorm(0.3), st.lognorm(1.2)],
    ),
    "shifted-lognormal": (
        pl.ShiftedLogNormal(_column(1.0), 0.5, 0.4),
        [st.lognorm(0.4, loc=1.0, scale=0.5)],
    ),
    "gamma": (
        pl.Gamma(2.0, _column(0.01, 0.08, 0.12, 0.13, 0.6, 20**0.5)),
        [_gamma(2.0, cv) for cv in (0.01, 0.08, 0.12, 0.13, 0.6, 20**0.5)],
    ),
    "weibull": (
        pl.Weibull(2.0, _column(0.6, 1.7, 60.0)),
        [st.weibull_min(shape, scale=2.0) for shape in (0.6, 1.7, 60.0)],
    ),
    "scaled": (
        pl.Scaled(pl.LogNormal(1.0, 0.3), _column(3.0, 0.5)),
        [st.lognorm(0.3, scale=3.0), st.lognorm(0.3, scale=0.5)],
    ),
    "shifted": (
        pl.Shifted(pl.Weibull(_column(0.25), 4.0), 2.0),
        [st.weibull_min(4.0, loc=2.0, scale=0.25)],
    ),
}
TABLE = np.exp(0.2 * np.linspace(-6, 6, 33)) + 0.1 * np.linspace(0, 1, 33) ** 2
OTHERS = {
    "constant": pl.Constant(_column(2.0)),
    "three-moment": pl.ThreeMoment(2.0, 0.3, _column(0.6, -0.6, 0.0)),
    "empirical": pl.Empirical(TABLE[None, None]),
    "mixture": pl.Mixture(
        np.array([[[3.0, 0.5]]]), (pl.LogNormal(1.0, 0.1), pl.ShiftedLogNormal(1.0, 0.5, 0.9))
    ),
}
ALL = {name: latency for name, (latency, _) in TWINS.items()} | OTHERS
every = pytest.mark.parametrize("name", ALL)


def _summary(latency, z, others):
    """Everything that a law says."""
    x = latency.from_normal(z)
    score = latency.to_normal(x)
    others = jnp.concatenate([latency.cdf(others), latency.survival(others)], axis=-1)
    return x, score, others, latency.mean(), latency.variance(), latency.third_moment()


def _value_and_moments(latency, z):
    return latency.from_normal(z), latency.mean(), latency.variance(), latency.third_moment()


@by_numpy
def _from_normal(latency, z):
    return latency.from_normal(z)


@ft.cache
def _summaries(name):
    """The summary at `SCORES`, one row for each case."""
    outside = jnp.asarray([[-1.0, 1e30]])
    return [np.asarray(y) for y in on_host(_summary, ALL[name], jnp.asarray(SCORES[None]), outside)]


@pytest.mark.parametrize("name", TWINS)
def test_scipy_twin(name):
    x, score, outside, *moments = _summaries(name)
    inner = slice(1, -1)
    # What is far below the smallest number that has all digits may be that number.
    beyond = [[0.0, 1.0, 1.0, 0.0]] * len(outside)
    np.testing.assert_allclose(outside, beyond, rtol=0, atol=np.finfo(float).tiny)
    for i, twin in enumerate(TWINS[name][1]):
        std = twin.std()
        expected = np.where(SCORES > 0, twin.isf(st.norm.sf(SCORES)), twin.ppf(st.norm.cdf(SCORES)))
        # SciPy's truncated normal loses its upper tail.
        end = -1 if name == "normal" else None
        np.testing.assert_allclose(x[i, :end], expected[:end], rtol=1e-9, atol=1e-10 * std)
        np.testing.assert_allclose(st.norm.cdf(score)[i, inner], twin.cdf(x[i, inner]), rtol=1e-7)
        np.testing.assert_allclose(st.norm.sf(score)[i, inner], twin.sf(x[i, inner]), rtol=1e-7)
        mean, variance, third = (float(np.broadcast_to(m, (len(x), 1))[i, 0]) for m in moments)
        np.testing.assert_allclose(mean, twin.mean(), rtol=1e-7)
        np.testing.assert_allclose(variance, twin.var(), rtol=1e-6)
        np.testing.assert_allclose(third / std**3, twin.stats("s"), rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"constant"}))
def test_scores_round_trip(name):
    x, score, *_ = _summaries(name)
    for i in range(len(x)):
        keep = np.abs(SCORES) < (6 if name == "empirical" else 9)
        if name == "normal" and i > 0:
            # The distance from zero is known to the rounding of the location.
            keep = SCORES > -4
        np.testing.assert_allclose(score[i, keep], SCORES[keep], atol=1e-7)
    assert np.all(np.diff(x[:, np.abs(SCORES) <= 6]) > 0)


@pytest.mark.parametrize("name", OTHERS)
def test_moments_of_the_law(name):
    """The stated moments are those of the quantile function."""
    z = jnp.linspace(-12, 12, 4801)[None]
    weights = jnp.exp(-0.5 * z**2)
    weights = weights / jnp.sum(weights)
    x = _from_normal(OTHERS[name], z)
    *_, mean, variance, third = _summaries(name)
    average = jnp.sum(weights * x, axis=1, keepdims=True)
    np.testing.assert_allclose(mean, average, rtol=1e-8)
    expected = jnp.sum(weights * (x - average) ** 2, axis=1, keepdims=True)
    np.testing.assert_allclose(variance, expected, rtol=1e-6, atol=1e-25)
    expected = jnp.sum(weights * (x - average) ** 3, axis=1, keepdims=True)
    np.testing.assert_allclose(third, expected, rtol=1e-5, atol=1e-6 * float(variance.max()) ** 1.5)


@pytest.mark.parametrize("name", ALL)
def test_samples_follow_the_law(name):
    latency = ALL[name]
    cases = latency.batch_shape[0]
    q = jnp.asarray([0.1, 0.9])

    @by_numpy
    def draw(latency):
        x = latency.sample(jr.key(7), (50, 40)).reshape(2000, cases)
        quantiles = latency.quantile(q)
        both = jnp.concatenate([x, quantiles[..., 0]])
        return x, quantiles, latency.cdf(both.T)

    x, quantiles, levels = draw(latency)
    assert x.shape == (2000, cases)
    assert quantiles.shape == (2, cases, 1)
    if name == "constant":
        assert np.all(x == 2.0)
        return
    for row in np.asarray(levels):
        assert st.kstest(row[:-2], "uniform").pvalue > 0.01
        np.testing.assert_allclose(row[-2:], q, rtol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_gradients_match_differences(name):
    """Of the quantile and of the distribution function, for every parameter and the argument."""
    latency = ALL[name]
    arrays, static = eqx.partition(latency, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)
    z, x = SCORES[None, 1:-1], _summaries(name)[0][:, 1:-1]

    def values(point):
        law = eqx.combine(unravel(point[:-1]), static)
        out = [law.from_normal(z + point[-1]), law.mean(), law.variance()]
        if name != "constant":
            out.append(law.cdf(x * (1.0 + point[-1])))
        return jnp.concatenate([y.reshape(-1) for y in out])

    point = np.append(flat, 0.0)
    size = 1e-5 * np.maximum(np.abs(point), 0.1)
    if name == "normal":
        # At the edge, differences are one-sided.
        size[2] = 0.0
    steps = np.concatenate([np.diag(size), -np.diag(size)])
    # In reverse: it is the transpose of the forward rule, and so tests both.
    jacobian = np.asarray(by_numpy(jax.jacrev(values))(point)).T
    high, low = np.split(np.asarray(by_numpy(jax.vmap(values))(point + steps)), 2)
    keep = size > 0
    expected = (high - low)[keep] / (2 * size[keep, None])
    scale = np.maximum(np.abs(expected).max(axis=1, keepdims=True), 1.0)
    tight = 3e-6 if name == "empirical" else 3e-7
    np.testing.assert_allclose(jacobian[keep] / scale, expected / scale, atol=tight, rtol=1e-5)
    assert np.all(np.isfinite(jacobian))


CONSTANTS = {
    "normal": (pl.Normal(2.0, 0.0), {"location": 1.0, "std": 1.3}),
    "lognormal": (pl.LogNormal(2.0, 0.0), {"median": 1.0, "sigma": 2.6}),
    "shifted": (pl.ShiftedLogNormal(1.0, 1.0, 0.0), {"shift": 1.0, "median": 1.0, "sigma": 1.3}),
    "gamma": (pl.Gamma(2.0, 0.0), {"location": 1.0, "cv": 2.6}),
    "weibull": (pl.Weibull(2.0, np.inf), {"scale": 1.0, "shape": 0.0}),
    "three-moment": (pl.ThreeMoment(2.0, 0.0, 0.0), {"location": 1.0, "std": 1.3}),
    "empirical": (pl.Empirical(np.full(9, 2.0)), {}),
    "scaled": (pl.Scaled(pl.LogNormal(1.0, 0.5), 0.0), {"factor": np.exp(0.65)}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_zero_variance(name):
    latency, expected = CONSTANTS[name]
    value = 0.0 if name == "scaled" else 2.0

    sides = jnp.asarray([value - 0.1, value + 0.1])

    def everything(latency):
        moments = latency.mean(), latency.variance(), latency.third_moment()
        return latency.from_normal(1.3), *moments, latency.cdf(sides)

    run = by_numpy(lambda law: (everything(law), eqx.filter_jacrev(everything)(law)))
    (x, mean, variance, third, levels), derivatives = run(latency)
    np.testing.assert_allclose([x, mean], value, rtol=1e-15)
    np.testing.assert_allclose([variance, third], 0.0, atol=1e-25)
    np.testing.assert_array_equal(levels, [0, 1])
    for parameter, derivative in expected.items():
        np.testing.assert_allclose(getattr(derivatives[0], parameter), derivative, rtol=1e-12)
    for leaf in jax.tree.leaves(derivatives):
        assert np.all(np.isfinite(leaf))


def test_zero_variance_in_a_mixture_and_a_maximum():
    mixture = pl.Mixture([0.75, 0.25], (pl.LogNormal(1.0, 0.0), pl.Constant(3.0)))
    of_quantile = eqx.filter_value_and_grad(lambda m, z: m.from_normal(z))
    run = by_numpy(lambda m, z: of_quantile(m, z))
    x, gradient = run(mixture, jnp.asarray(-0.2))
    np.testing.assert_allclose(x, 1.0, rtol=1e-14)
    body, slow = gradient.components
    np.testing.assert_allclose(body.median, 1.0, rtol=1e-12)
    # The score within the component, as in the limit of small sigma.
    within = st.norm.ppf(st.norm.cdf(-0.2) / 0.75)
    np.testing.assert_allclose(body.sigma, within, rtol=1e-9)
    assert slow.value == 0.0
    np.testing.assert_array_equal(gradient.weights, 0.0)
    x, gradient = run(mixture, jnp.asarray(1.5))
    np.testing.assert_allclose(x, 3.0, rtol=1e-14)
    np.testing.assert_allclose(gradient.components[1].value, 1.0, rtol=1e-12)
    assert gradient.components[0].sigma == 0.0
    # Close to the limit, the smooth rule agrees.
    narrow = eqx.tree_at(lambda m: m.components[0].sigma, mixture, jnp.asarray(1e-6))
    _, gradient = run(narrow, jnp.asarray(-0.2))
    np.testing.assert_allclose(gradient.components[0].sigma, within, rtol=1e-5)
    np.testing.assert_allclose(mixture.variance(), 0.75 * 0.25 * 4)
    slope = eqx.filter_grad(lambda law: _moments_of_maximum(law, 4)[0])
    gradient = by_numpy(lambda law: slope(law))(pl.LogNormal(1.0, 0.0))
    np.testing.assert_allclose(gradient.sigma, 1.029375373, rtol=1e-8)


@pytest.mark.parametrize("skewness", [0.0, 1e-9, 1e-3, 0.3, 1.0, -0.5])
def test_three_moments_match(skewness):
    latency = pl.ThreeMoment(5.0, 2.0, skewness)
    np.testing.assert_allclose(latency.mean(), 5.0, rtol=2e-5)
    np.testing.assert_allclose(latency.variance(), 4.0, rtol=2e-3)
    np.testing.assert_allclose(latency.third_moment(), 8 * skewness, rtol=0.02, atol=1e-12)
    z = jnp.linspace(-3.0, 3.0, 13)
    pearson = st.pearson3(skewness, 5.0, 2.0).ppf(st.norm.cdf(z))
    np.testing.assert_allclose(latency.from_normal(z), pearson, atol=0.1 * skewness**2 + 1e-7)


def test_cube_of_a_normal_inverts():
    z = jnp.linspace(-5, 5, 11)
    for skewness in (-1.0, -1e-7, 0.0, 0.7):
        y = pl.cube_normal(z, jnp.asarray(skewness))
        np.testing.assert_allclose(pl.cube_normal_score(y, jnp.asarray(skewness)), z, atol=1e-10)


def test_mixture_against_brentq():
    wide = [(0.9, st.lognorm(0.02)), (0.08, st.lognorm(0.2, scale=1.5)), (0.02, st.gamma(4.0))]
    mixture = pl.Mixture(
        [w for w, _ in wide], (pl.LogNormal(1.0, 0.02), pl.LogNormal(1.5, 0.2), pl.Gamma(4.0, 0.5))
    )
    z = np.linspace(-7, 7, 57)
    x = np.asarray(_from_normal(mixture, jnp.asarray(z)))

    def error(x, z):
        if z > 0:
            return np.log(st.norm.sf(z)) - np.log(sum(w * law.sf(x) for w, law in wide))
        return np.log(sum(w * law.cdf(x) for w, law in wide)) - np.log(st.norm.cdf(z))

    expected = [so.brentq(ft.partial(error, z=s), 1e-6, 200, xtol=1e-14) for s in z]
    np.testing.assert_allclose(x, np.array(expected), rtol=1e-10)


@by_numpy
def _moments_of_maximum(law, count):
    def latency(z):
        return law.from_normal(pl.score_of_maximum(z, count))

    mean = expectation(latency, law.dtype)
    variance = expectation(lambda z: (latency(z) - mean) ** 2, law.dtype)
    return mean, variance, expectation(lambda z: (latency(z) - mean) ** 3, law.dtype)


def test_score_of_maximum_against_closed_forms():
    """Of exponential copies (harmonic numbers), of normal copies, and of drawn copies."""
    k = np.arange(1, 65)
    mean, variance, third = _moments_of_maximum(pl.Weibull(2.0, 1.0), 64)
    np.testing.assert_allclose(mean, 2 * np.sum(1 / k), rtol=1e-10)
    np.testing.assert_allclose(variance, 4 * np.sum(1 / k**2), rtol=1e-10)
    np.testing.assert_allclose(third, 16 * np.sum(1 / k**3), rtol=1e-9)
    mean, variance, _ = _moments_of_maximum(pl.Normal(100.0, 1.0), 2)
    np.testing.assert_allclose(mean - 100, 1 / np.sqrt(np.pi), rtol=1e-10)
    np.testing.assert_allclose(variance, 1 - 1 / np.pi, rtol=1e-10)

    base = pl.LogNormal(1.0, 0.3)

    @by_numpy
    def run(base):
        scores = base.to_normal(base.sample(jr.key(3), (20_000, 24)).max(axis=1))
        return scores, pl.score_of_maximum(scores[:1000], 24)

    # Each copy has the score that the slowest of 24 has: so the slowest have the law of one copy.
    slowest, scores = run(base)
    levels = st.norm.cdf(slowest) ** 24
    assert st.kstest(levels, "uniform").pvalue > 0.01
    np.testing.assert_allclose(st.norm.cdf(scores) ** 24, st.norm.cdf(slowest[:1000]), rtol=1e-10)
    of_one = by_numpy(lambda z: pl.score_of_maximum(z, 1))
    np.testing.assert_array_equal(of_one(jnp.asarray(SCORES)), SCORES)


def test_tails_of_the_normal():
    z = np.concatenate([np.linspace(-36, 8, 177), [-200.0, -60.0]])

    @by_numpy
    def run(z):
        log_p, back = log_ndtr(z), ndtri_exp(log_ndtr(z))
        slope = jax.vmap(jax.grad(lambda z: ndtri_exp(log_ndtr(z))))(z)
        return log_p, back, slope, ndtri_exp(0 * z)

    log_p, back, slope, end = run(jnp.asarray(z))
    np.testing.assert_allclose(log_p, st.norm.logcdf(z), rtol=1e-9)
    np.testing.assert_allclose(back, z, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(slope, 1.0, rtol=1e-3)
    np.testing.assert_array_equal(end, jnp.inf)


def test_empirical_from_samples():
    draws = np.random.default_rng(0).gamma(4.0, 0.5, (2, 100_000))
    latency = pl.empirical_from_samples(draws, num_nodes=65)
    assert latency.batch_shape == (2,)
    q = np.array([0.01, 0.5, 0.99])

    @by_numpy
    def run(latency):
        x = latency.quantile(q), latency.from_normal(9.0)
        return latency.mean(), latency.variance(), *x, latency.cdf(latency.quantile(0.3))

    mean, variance, quantiles, end, level = run(latency)
    np.testing.assert_allclose(mean, draws.mean(axis=1), rtol=5e-4)
    np.testing.assert_allclose(variance, draws.var(axis=1), rtol=1e-3)
    np.testing.assert_allclose(quantiles, np.quantile(draws, q, axis=1), rtol=3e-3)
    np.testing.assert_allclose(level, 0.3, rtol=1e-10)
    np.testing.assert_array_equal(end, draws.max(axis=1))
    assert pl.empirical_from_samples(draws[0].astype(np.float32)).dtype == jnp.float32


def test_empirical_approaches_the_law():
    """A table of 129 nodes reproduces a smooth law and its moments."""
    law = pl.LogNormal(1.0, 0.2)
    table = pl.Empirical(law.from_normal(jnp.linspace(-6, 6, 129)))
    z = jnp.linspace(-5, 5, 777)

    @by_numpy
    def run(law):
        return law.from_normal(z), law.mean(), law.variance(), law.third_moment()

    for x, y, tolerance in zip(run(table), run(law), (1e-6, 1e-8, 1e-6, 1e-5), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance)


def _batched():
    a = jnp.asarray([1.0, 2.0, 3.0])
    b = jnp.asarray([0.05, 0.3, 0.9])
    mixture = pl.Mixture(
        jnp.asarray([[1.0, 0.1], [1.0, 0.2], [1.0, 1.0]]), (pl.LogNormal(a, b), pl.Constant(4.0))
    )
    return {
        "constant": pl.Constant(a),
        "normal": pl.Normal(a, b),
        "lognormal": pl.LogNormal(a, 0.2),
        "shifted-lognormal": pl.ShiftedLogNormal(a, 1.0, b),
        "gamma": pl.Gamma(a, b),
        "weibull": pl.Weibull(a, 1.5),
        "empirical": pl.Empirical(a[:, None] + jnp.linspace(0.0, 1.0, 17)[None] ** 2),
        "mixture": mixture,
        "scaled": pl.Scaled(pl.LogNormal(1.0, 0.2), a),
        "shifted": pl.Shifted(pl.LogNormal(a, 0.2), 1.0),
        "three-moment": pl.ThreeMoment(a, b, 0.3),
    }


@pytest.mark.parametrize("name", _batched())
def test_batches_and_transforms(name):
    latency = _batched()[name]
    assert latency.batch_shape == (3,)
    column = jnp.linspace(-2.0, 2.0, 3)

    def everything(latency):
        x = latency.from_normal(column)
        return (
            x,
            latency.from_normal(0.5),
            latency.to_normal(x),
            latency.cdf(1.5),
            latency.sample(jr.key(0), (2, 5)),
            latency.quantile(jnp.asarray([[0.2, 0.5, 0.6, 0.7]])),
            latency.mean(),
            latency.variance(),
            latency.third_moment(),
        )

    shapes = [(3,)] * 4 + [(2, 5, 3), (1, 4, 3)] + [(3,)] * 3
    assert [y.shape for y in eqx.filter_eval_shape(everything, latency)] == shapes
    x = _from_normal(latency, column)
    if name not in ("gamma", "mixture"):  # Slow without compilation.
        compiled = eqx.filter_jit(lambda latency: latency.from_normal(column))
        np.testing.assert_allclose(compiled(latency), x, rtol=1e-12)

    # One batch element at a time: by vmap over the parameters that have a batch, and by indexing.
    arrays, static = eqx.partition(latency, eqx.is_array)
    axes = jax.tree.map(lambda leaf: 0 if leaf.shape[:1] == (3,) else None, arrays)
    one = lambda arrays, z: eqx.combine(arrays, static).from_normal(z)  # noqa: E731
    mapped = by_numpy(jax.vmap(one, (axes, 0)))(arrays, column)
    np.testing.assert_allclose(mapped, x, rtol=1e-12)
    loop = by_numpy(one)
    for i in range(3):
        single = jax.tree.map(lambda l, axis, i=i: l if axis is None else l[i], arrays, axes)
        np.testing.assert_allclose(loop(single, column[i]), x[i], rtol=1e-12)

    leaves, treedef = jax.tree.flatten(latency)
    assert eqx.tree_equal(jax.tree.unflatten(treedef, leaves), latency)
    assert all(leaf.dtype == jnp.float64 for leaf in leaves)


@every
def test_single_precision(name):
    latency = ALL[name]
    # Both from the same rounded parameters.
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), latency)
    double = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single)
    assert single.dtype == jnp.float32
    z = jnp.asarray(SCORES[None], jnp.float32)
    outside = jnp.asarray([[-1.0, 1e30]])
    given = single, z, outside.astype(jnp.float32)
    for y in eqx.filter_eval_shape(_summary, *given):
        assert y.dtype == jnp.float32
    # Compiled, because NumPy would compute in double precision.
    x, *moments = eqx.filter_jit(_value_and_moments)(single, z)
    expected, _, _, *exact = on_host(_summary, double, z.astype(jnp.float64), outside)
    std = np.sqrt(np.broadcast_to(exact[1], (len(x), 1)))
    expected = np.asarray(expected)
    error = np.abs(np.asarray(x) - expected) / np.maximum(np.abs(expected), std)
    assert np.max(error[:, 1:-1]) < 5e-6
    for y, e, tolerance in zip(moments, exact, (2e-6, 1e-3, 1e-2), strict=True):
        np.testing.assert_allclose(y, e, rtol=tolerance, atol=1e-6)


def test_scalars_take_the_dtype_of_arrays():
    latency = pl.LogNormal(jnp.ones(2, jnp.float32), 0.1)
    assert latency.sigma.dtype == jnp.float32
    assert pl.Scaled(latency, 2).factor.dtype == jnp.float32
    assert pl.Mixture([1, 2], (latency, latency)).weights.dtype == jnp.float32
    assert pl.LogNormal(np.arange(1, 3), 1).median.dtype == jnp.float64
    assert latency.sample(jr.key(0), (3,)).dtype == jnp.float32


def test_gamma_is_smooth_across_its_branches():
    """The series and Newton's method meet, in value and derivative, and down to no variance."""
    run = by_numpy(jax.vmap(jax.value_and_grad(lambda cv, z: pl.Gamma(1.0, cv).from_normal(z))))
    z = jnp.asarray([-6.0, -1.0, 0.0, 2.0, 6.0])
    below, slope_below = run(jnp.full(5, 0.125), z)
    above, slope_above = run(jnp.full(5, 0.125 + 1e-13), z)
    np.testing.assert_allclose(below, above, rtol=1e-11)
    np.testing.assert_allclose(slope_below, slope_above, rtol=1e-8, atol=1e-9)
    value, slope = run(jnp.asarray([0.0, 1e-12, 1e-7, 1e-4, 1e-3]), jnp.full(5, 2.0))
    np.testing.assert_allclose(value, 1 + 2 * np.array([0, 1e-12, 1e-7, 1e-4, 1e-3]), atol=2e-6)
    np.testing.assert_allclose(slope, 2.0, atol=3e-3)


def test_families_say_what_they_take_and_have_the_mean_of_one():
    classes = [cls for cls in subclasses(pl.AbstractLatency) if not inspect.isabstract(cls)]
    classes = [cls for cls in classes if cls.__module__.startswith("prism_jax.")]
    assert len(classes) >= 11
    assert all("**Arguments:**" in (cls.__init__.__doc__ or "") for cls in classes)
    given = {"sigma": 0.0, "slow_weight": 0.25, "slow_factor": 3.0}
    np.testing.assert_allclose(pl.make_latency("lognormal-mixture", given).mean(), 1.5)
    assert pl.make_latency("gamma", {"cv": 0.1}).mean() == 1.0


def test_a_law_shows_the_values_that_make_it_again():
    parts = pl.LogNormal(0.1, 0.2), pl.ShiftedLogNormal(1.0, 2e-7, 0.25)
    for law in (
        pl.Normal(2, 0.1),
        pl.Scaled(pl.Mixture([1, 3], parts), 3.0),
        pl.Empirical([1, 2, 4]),
    ):
        assert eqx.tree_equal(eval(repr(law), {**vars(pl)}), law)
    assert (
        repr(pl.LogNormal(1.5, np.array([[0.25, 0.5]])))
        == "LogNormal(median=1.5, sigma=[[0.25, 0.5 ]])"
    )
    jax.eval_shape(lambda x: (repr(pl.Constant(x)), x)[1], 1.0)


def test_check_passes_over_good_values_and_tracers():
    for latency in ALL.values():
        assert pl.check(latency) is None
    assert jax.jit(lambda sigma: pl.check(pl.LogNormal(1.0, sigma)))(-1.0) is None
