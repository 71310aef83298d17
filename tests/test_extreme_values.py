"""Latencies and laws beyond what single precision holds the powers of: right, or refused."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.latency import Constant, Gamma, LogNormal, Normal, Scaled, ThreeMoment, Weibull
from prism_jax.program import Network, Stall, Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica import make_plan
from prism_jax.workload import Branches, Kernel, Segment

from .helpers import graph_of, lognormal, one_kernel, refusal


@pytest.fixture
def single():
    with jax.enable_x64(False):
        yield


def _block(mean: float):
    """Members that wait for one another, beside collectives that are as long."""
    row = ((Kernel("gemm", f"{mean!r}", mean), 2),)
    beside = ((Kernel("all_gather", f"{mean!r}", 1.5 * mean, "nvlink"), 2),)
    return ((Segment(row, None, (Branches(row, (beside,), (0.1, 0.2)),)), 2),)


def _program(*means: float, sigma: float = 0.1):
    """Blocks one after the other, with all factors that ops share."""
    laws = Variability(
        residual={"gemm": lognormal(sigma), "all_gather": lognormal(sigma)},
        rank=lognormal(0.02),
        step=lognormal(0.01),
        worker_step=lognormal(0.01),
        network=Network(jnp.asarray(0.1), jnp.asarray(3.0)),
    )
    graph = graph_of([(op - 1,) if op else () for op in range(len(means))])
    blocks = [_block(mean) for mean in means]
    options = {"variability": laws, "group_size": 4, "network_links": ("nvlink",)}
    return assemble(graph, blocks, **options)


def _derivatives(program, objective):
    found = eqx.filter_grad(prism.estimate)(
        program, objective, num_samples=1_000, key=jax.random.key(1)
    )
    laws = found.variability
    return np.asarray(found.latencies.mean), np.array(
        [laws.residual["gemm"].sigma, laws.residual["all_gather"].sigma, laws.rank.sigma]
    )


def test_other_units_of_time_change_no_bit(single):
    """From 1e-18 to 1e18 seconds, by powers of two: figures and derivatives."""
    base = None
    for exponent in (0, -59, 57):
        scale = 2.0**exponent
        program = _program(scale, 2 * scale)
        law = prism.simulate(program, num_samples=500, key=jax.random.key(0), sampling="plain")
        of_means, of_laws = _derivatives(program, prism.Quantile(0.9))
        found = np.array([law.mean, law.std, law.quantile(0.5), law.errors.mean]) / scale
        found = found, of_means, of_laws / scale
        base = found if base is None else base
        jax.tree.map(np.testing.assert_array_equal, found, base)
        assert np.isfinite(found[2]).all()


@pytest.mark.parametrize(("shorter", "sigma"), [(1e-6, 0.1), (1e-9, 1e-4), (1e-18, 0.1)])
def test_negligible_ops_change_neither_law_nor_derivatives(shorter, sigma, single):
    alone, program = _program(1e6, sigma=sigma), _program(1e6 * shorter, 1e6, sigma=sigma)
    laws = [
        prism.simulate(one, num_samples=4_000, key=jax.random.key(0), sampling="plain")
        for one in (alone, program)
    ]
    noise = np.hypot(laws[0].errors.mean, laws[1].errors.mean)
    assert laws[1].mean == pytest.approx(laws[0].mean, abs=4 * noise)
    found = [_derivatives(program, one) for one in (prism.Mean(), prism.Std())]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    # Homogeneous of degree one in all means: Euler's theorem.
    of_means, _ = found[0]
    means = np.asarray(program.latencies.mean)
    assert of_means @ means == pytest.approx(laws[1].mean, abs=4 * np.sqrt(5) * laws[1].errors.mean)


def test_the_shortest_and_the_longest_op_of_a_graph(single):
    ops = [prism.Op(LogNormal(1e-12, 0.1)), prism.Op(LogNormal(1e6, 0.1), after=[0])]
    program = prism.compile_graph(ops)
    law = prism.simulate(program, num_samples=20_000, key=jax.random.key(0), sampling="plain")
    assert law.mean == pytest.approx(1e6 * np.exp(0.005), abs=4 * law.errors.mean)


@pytest.mark.parametrize(
    ("latencies", "match"),
    [
        ([1e-40, 1.0], "Op 0 has a mean latency of 1e-40 s, less than the least number"),
        ([1e-50], "Op 0 has a mean latency of 1e-50 s, less than the least"),
        ([0.0, 1e-30], r"Op 1 has a mean .* 1e-30 s, and the longest must be between 8e-19 and"),
        ([1e-30, 1e30], r"Op 1 has a mean latency of 1e\+30 s, and the longest"),
        ([1e39], r"Op 0 has a mean latency of 1e\+39 s, and the longest"),
        ([np.nan], "Op 0 has a mean latency of nan s, negative or not finite"),
        ([1.0, -1.0], "Op 1 has a mean latency of -1 s, negative or not finite"),
    ],
)
def test_a_latency_that_single_precision_does_not_hold_is_refused(latencies, match, single):
    with pytest.raises(ValueError, match=match):
        prism.compile_graph([prism.Op(seconds) for seconds in latencies])


@pytest.mark.parametrize(
    "law",
    [
        lambda scale: LogNormal(scale, 0.1),
        lambda scale: Gamma(scale, 0.1),
        lambda scale: Normal(scale, 0.1),
        lambda scale: Weibull(scale, 2.0),
        lambda scale: ThreeMoment(scale, 0.1, 0.5),
        lambda scale: Constant(scale),
        lambda scale: Scaled(lognormal(0.1), scale),
    ],
)
def test_the_scale_of_a_law_does_not_become_zero(law, single):
    refusal(lambda: law(1e-50), "is 1e-50, less than the least number that float32 holds")
    law(0.0)


def test_the_scale_of_the_law_of_an_op_is_refused_where_cubes_are_lost(single):
    ops = [prism.Op(1.0), prism.Op(LogNormal(1e-13, 0.1))]
    refusal(lambda: prism.compile_graph(ops), "law of op 1 has a mean ... give means as numbers")
    laws = Variability(residual={"gemm": LogNormal(1e-13, 0.1)})
    program = assemble(graph_of([()]), [one_kernel("gemm", 1.0)], variability=laws)
    with pytest.raises(ValueError, match=r"law of the residual of gemm has a mean of 1.005"):
        prism.simulate(program, num_samples=10, key=jax.random.key(0))


def test_means_that_were_changed_are_refused_by_the_name_of_the_kernel(single):
    program = assemble(graph_of([()]), [one_kernel("gemm", 1.0)])
    for seconds, match in ((-1.0, "negative or not finite"), (1e-39, "less than the least number")):
        changed = eqx.tree_at(lambda p: p.latencies.mean, program, jnp.full(1, np.float32(seconds)))
        with pytest.raises(ValueError, match=f"Kernel gemm 1.0 has a mean latency.*{match}"):
            prism.simulate(changed, num_samples=10, key=jax.random.key(0))


@ft.cache
def _share_and_slope():
    """The share of stalls that the first of three equal ops has, and its derivative by the rate of
    the others: compiled once, for all rates.
    """

    def share(other, rate):
        stalls = {"gemm": Stall(rate, law), "norm": Stall(other, law)}
        changed = eqx.tree_at(lambda p: p.variability.stalls, program, stalls)
        shares = make_plan(changed).tables.stall_shares
        return shares[0]

    law, blocks = lognormal(0.1), [one_kernel(kind, 1.0) for kind in ("gemm", "norm", "norm")]
    known = Variability(stalls={k: Stall(jnp.asarray(1e-3), law) for k in ("gemm", "norm")})
    program = assemble(graph_of([(), (), ()]), blocks, variability=known)
    return jax.jit(jax.value_and_grad(share))


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1e-20, 1e-37])
def test_the_shares_of_rare_stalls_have_derivatives(rate, single):
    """The share of the first of three equal ops falls with the rate of the others."""
    value, slope = _share_and_slope()(jnp.asarray(rate), jnp.asarray(rate))
    assert value == (pytest.approx(1 / 3) if rate else 0)
    # The derivative of r / (r + 2 s) with respect to s is -2 r / (r + 2 s)^2.
    assert rate * float(slope) == pytest.approx(-2 / 9 if rate else 0, rel=1e-5)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("sigma", [1.5, 3.0])
def test_a_kind_that_varies_too_much_for_its_block_is_named(sigma, x64):
    spread = np.sqrt(np.expm1(sigma**2))
    with jax.enable_x64(x64):
        laws = Variability(residual={"gemm": lognormal(sigma), "norm": lognormal(0.1)})
        kernels = (Kernel("norm", "a", 1.0), 2), (Kernel("gemm", "b", 1.0), 1)
        program = assemble(graph_of([()]), [((Segment(kernels), 1),)], variability=laws)
        with pytest.raises(ValueError, match=rf"skewness .* `gemm`, .* is {spread:.2g} times"):
            prism.simulate(program, num_samples=10, key=jax.random.key(0))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("sigma", [4.0, 6.0, 10.0, 1e9])
@pytest.mark.parametrize("part", ["residual of gemm", "step factor", "stall of gemm"])
def test_a_law_whose_mean_no_samples_tell_is_named(part, sigma, x64):
    spread = np.sqrt(np.expm1(sigma**2)) if sigma < 20 else None
    told = "over 1e15" if spread is None else f"{spread:.3g}".replace("+", r"\+")
    with jax.enable_x64(x64):
        law = lognormal(sigma)
        laws = {
            "residual of gemm": Variability(residual={"gemm": law}),
            "step factor": Variability(step=law),
            "stall of gemm": Variability(stalls={"gemm": Stall(jnp.asarray(1e-3), law)}),
        }
        program = assemble(graph_of([()]), [one_kernel("gemm", 1.0)], variability=laws[part])
        with pytest.raises(ValueError, match=f"law of the {part} has .* of {told} times its mean"):
            prism.simulate(program, num_samples=10, key=jax.random.key(0))
