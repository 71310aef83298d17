"""On which ops the factors of a step and of a microbatch act, by closed forms."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from prism_jax.analysis import Exceedance, Std, estimate
from prism_jax.data import load_job
from prism_jax.engine import simulate
from prism_jax.program import Network, Variability
from prism_jax.program._assemble import assemble
from prism_jax.replica import sample_replica_ends
from prism_jax.workload import Branches, Kernel, Segment

from .helpers import compile_with, graph_of, lognormal, one_kernel


_SIGMA = 0.1
_CV = np.sqrt(np.expm1(_SIGMA**2))
_COMPUTE, _COLLECTIVE = Kernel("gemm", "", 1.0), Kernel("all_gather", "", 0.5, "network")
_LONGER = Kernel("all_gather", "longer", 3.0, "network")
_SAMPLES, _KEY = 20_000, jax.random.key(0)


def _after_it(seconds, **laws):
    """A step of one op that takes a second, and a tail."""
    tail = one_kernel("optimizer", seconds)
    return assemble(
        graph_of([()]), [one_kernel("gemm", 1.0)], tail=tail, variability=Variability(**laws)
    )


def test_the_step_s_factor_acts_on_the_tail():
    program = _after_it(1.0, step=lognormal(_SIGMA))
    found = simulate(program, num_samples=_SAMPLES, key=_KEY, sampling="plain")
    assert found.std == pytest.approx(2 * _CV, rel=4 / np.sqrt(2 * _SAMPLES))
    low, high = found.quantile_interval(0.95, 0.999)
    assert low <= 2 * np.exp(_SIGMA * 1.6449 - _SIGMA**2 / 2) <= high


@pytest.mark.parametrize("of_tail", [0.02, 0.5])
def test_derivatives_by_the_factor_and_by_the_tail_agree_with_an_integral(of_tail):
    """By all draws but the step's factor, where this spreads a step more; or but the tail."""
    threshold, tail = 2.2, 1.0

    def exceedance(mean, sigma):
        """P(G (1 + mean X) > threshold) of log-normal G and X, by Gauss and Hermite."""
        z, weights = np.polynomial.hermite_e.hermegauss(80)
        x = np.exp(of_tail * z - of_tail**2 / 2)
        score = (np.log(threshold / (1 + mean * x)) + sigma**2 / 2) / sigma
        return weights @ scipy.stats.norm.sf(score) / weights.sum()

    program = _after_it(tail, step=lognormal(_SIGMA), residual={"optimizer": lognormal(of_tail)})
    gradient = eqx.filter_grad(estimate)(
        program, Exceedance(threshold), num_samples=_SAMPLES, key=_KEY
    )
    (kernel,) = (k for k, kind in enumerate(program.latencies.kinds) if kind == "optimizer")
    change = 1e-4
    by_mean = exceedance(tail + change, _SIGMA) - exceedance(tail - change, _SIGMA)
    by_sigma = exceedance(tail, _SIGMA + change) - exceedance(tail, _SIGMA - change)
    found = np.array([gradient.latencies.mean[kernel], gradient.variability.step.sigma])
    expected = np.array([by_mean, by_sigma]) / (2 * change)
    np.testing.assert_allclose(found, expected, rtol=0.03)


def _beside(collective, contention=(0.0, 0.0)):
    branches = Branches(((_COMPUTE, 1),), (((collective, 1),),), contention)
    return ((Segment((), None, (branches,)), 1),)


_SERIAL = ((Segment(((_COMPUTE, 1),), _COLLECTIVE), 1),)
# Blocks, and when each ends if the data of its microbatch take `f` times as long as they do on
# average, and the network `n` times.
_BLOCKS = (
    (_beside(_COLLECTIVE), lambda f, n: f),
    (_SERIAL, lambda f, n: f + 0.5 * n),
    (_beside(_COLLECTIVE, (0.2, 0.0)), lambda f, n: f + 0.5 * n * 0.2 / 1.2),
    (_beside(_LONGER), lambda f, n: 3.0 * n),
    (_beside(_LONGER, (0.0, 0.2)), lambda f, n: 3.0 * n + f * 0.2 / 1.2),
    (_SERIAL + _beside(_LONGER), lambda f, n: f + 3.5 * n),
)


def test_a_microbatch_s_factor_acts_on_compute_alone():
    sigma = 0.03  # So small that what ends last is the same in all samples.
    laws = Variability(
        microbatch=lognormal(sigma), network=Network(jnp.asarray(0.5), jnp.asarray(4.0))
    )
    graph = graph_of([()] * len(_BLOCKS), rank=range(len(_BLOCKS)))
    program = assemble(
        graph,
        [block for block, _ in _BLOCKS],
        variability=laws,
        group_size=2,
        network_links=("network",),
    )
    ids = jnp.arange(_SAMPLES, dtype=jnp.uint32)
    ends = np.asarray(sample_replica_ends(program, ids, _KEY))
    data = ends[0]
    law = scipy.stats.norm(-(sigma**2) / 2, sigma)
    assert scipy.stats.kstest(np.log(data), law.cdf).pvalue > 0.01
    network = np.where(ends[3] < 3.0, 0.4, 1.6)
    assert np.mean(network) == pytest.approx(1.0, abs=0.05)
    # Latencies that are constant are taken to vary by 1e-6 of their mean.
    for found, (_, end) in zip(ends, _BLOCKS, strict=True):
        np.testing.assert_allclose(found, end(data, network), rtol=1e-4)


def test_derivatives_of_a_spread_by_compute_and_by_a_collective():
    program = assemble(
        graph_of([()]), [_SERIAL], variability=Variability(microbatch=lognormal(_SIGMA))
    )
    place = {kind: k for k, kind in enumerate(program.latencies.kinds)}
    gradient = eqx.filter_grad(estimate)(program, Std(), num_samples=_SAMPLES, key=_KEY)
    means = gradient.latencies.mean
    assert means[place["gemm"]] == pytest.approx(_CV, rel=0.03)
    assert means[place["all_gather"]] == pytest.approx(0.0, abs=1e-3)
    by_sigma = (1 + _CV**2) * _SIGMA / _CV
    assert gradient.variability.microbatch.sigma == pytest.approx(by_sigma, rel=0.03)


@pytest.mark.parametrize(
    "laws",
    [
        {"microbatch": 0.05},
        {"worker_step": 0.02},
        {"rank": 0.01, "worker_step": 0.02, "microbatch": 0.03},
    ],
)
def test_the_slowest_worker_of_a_group_decides(laws):
    """The product of log-normal factors is log-normal, and all of it varies from step to step."""
    number, sigma = 64, np.hypot.reduce([*laws.values()])
    block = ((Segment(((Kernel("gemm", "one", 1.0), 1),), members=number), 1),)
    factors: Any = {name: lognormal(value) for name, value in laws.items()}
    variability = Variability(**factors)
    options: Any = {"group_size": number, "members": 1}
    program = assemble(graph_of([()]), [block], variability=variability, **options)
    law = simulate(program, num_samples=2**14, key=jax.random.key(0))
    z = (np.arange(2**16) + 0.5) / 2**16
    exact = np.exp(sigma * scipy.stats.norm.ppf(z ** (1 / number)) - sigma**2 / 2)
    assert law.mean == pytest.approx(exact.mean(), rel=5e-4)
    assert law.std == pytest.approx(exact.std(), rel=0.03)
    assert law.quantile(0.99) == pytest.approx(np.quantile(exact, 0.99), rel=2e-3)


def test_gpus_of_workers_that_hardly_differ_wait_as_if_these_were_equal():
    """Two GPUs of each of four workers, whose kernels vary as much as they do."""
    block = ((Segment(((Kernel("gemm", "one", 1.0), 1),), members=8), 1),)
    gpus: Any = {"residual": {"gemm": lognormal(0.02)}, "rank": lognormal(0.02)}
    options: Any = {"group_size": 8, "members": 2}
    variabilities = Variability(**gpus), Variability(**gpus, worker_step=lognormal(1e-6))
    programs = [assemble(graph_of([()]), [block], variability=v, **options) for v in variabilities]
    equal, differ = (simulate(one, num_samples=2**14, key=_KEY) for one in programs)
    assert differ.mean == pytest.approx(equal.mean, rel=2e-4)
    assert differ.std == pytest.approx(equal.std, rel=0.02)


@pytest.mark.parametrize(("zero", "together"), [(1, 2), (3, 1)])
def test_replicas_wait_for_the_slowest_microbatches_between_two_meetings(zero, together):
    """Of 64 replicas: of two microbatches after a step or, in FSDP, of one at a time."""
    changes = "layout.tp=1", "layout.pp=1", "layout.dp=64", "num_nodes=8", "schedule.kind=1f1b"
    changes += "schedule.virtual_stages=1", "model=llama-3.1-8b", "model.num_layers=4"
    changes += "schedule.num_microbatches=2", "training.microbatch_size=8", f"training.zero={zero}"
    job = load_job("gpt3-175b-h100-768", changes)
    laws = Variability(), Variability(microbatch=lognormal(0.05))
    programs = [compile_with(job, one) for one in laws]
    usual, uneven = (simulate(one, num_samples=2**14, key=_KEY).mean for one in programs)
    factors = np.random.default_rng(0).lognormal(-(0.05**2) / 2, 0.05, (20_000, 64, together))
    slowest = factors.mean(axis=2).max(axis=1).mean()
    # Up to a tenth of the step is communication that nothing hides.
    assert 0.9 * (slowest - 1) < uneven / usual - 1 < 1.01 * (slowest - 1)
