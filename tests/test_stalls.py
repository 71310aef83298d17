"""Stalls of several kinds: each has a size and a rate of its own."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import prism_jax as prism
from prism_jax.latency import AbstractLatency, LogNormal
from prism_jax.program import Stall, Variability
from prism_jax.program._assemble import assemble
from prism_jax.workload import Branches, Kernel, Segment

from .helpers import graph_of


OPS, SIGMA, RATE = 6, 0.01, 2e-3
SIZES, SPREAD = {"attention": 1.0, "gemm": 0.01}, 0.1


def _chain(num_replicas: int) -> prism.Program:
    """Ops of two kinds in turn, one after the other; stalls last 1 s and 0.01 s."""
    ops = [
        prism.Op(0.1, kind="gemm" if i % 2 else "attention", after=[i - 1] if i else [])
        for i in range(OPS)
    ]
    stalls = {
        kind: Stall(jnp.asarray(RATE), LogNormal(jnp.asarray(size), jnp.asarray(SPREAD)))
        for kind, size in SIZES.items()
    }
    law = LogNormal(jnp.asarray(1.0), jnp.asarray(SIGMA))
    residual: dict[str, AbstractLatency] = dict.fromkeys(SIZES, law)
    return prism.compile_graph(
        ops, variability=Variability(residual=residual, stalls=stalls), num_replicas=num_replicas
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 64])
def test_each_kind_of_stall_has_its_own_derivative(num_replicas):
    """One kind costs a hundred times as much as the other; differences of a mean found without the
    library say how much.
    """

    @eqx.filter_grad
    def gradient(program, key):
        return prism.estimate(program, prism.Mean(), num_samples=2**15, key=key)

    program = _chain(num_replicas)
    keys = jax.random.split(jax.random.key(0), 12)
    found = [gradient(program, key).variability.stalls for key in keys]
    for kind, direction in (("attention", np.array([1, 0])), ("gemm", np.array([0, 1]))):
        rates = [float(one[kind].rate) for one in found]
        error = np.std(rates, ddof=1) / np.sqrt(len(rates))
        low, high = (_mean(num_replicas, RATE + sign * 1e-3 * direction) for sign in (-1, 1))
        expected = (high - low) / 2e-3
        assert abs(np.mean(rates) - expected) < 4 * error + 0.003 * expected
        assert error < 0.3 * expected


_COMPUTE = Kernel("gemm", "one", 1.0)
_BESIDE = Branches(((_COMPUTE, 1),), (((Kernel("all_gather", "one", 1.5), 1),),))


@pytest.mark.parametrize(
    ("segment", "rate", "size", "expected"),
    [
        # Collectives beside it hide half a second of each.
        (Segment((), None, (_BESIDE,)), 0.002, 0.8, (0.8 - 0.5) * -np.expm1(-16 * 0.002)),
        (Segment((), None, (_BESIDE,)), 0.002, 0.4, 0.0),
        # Of several at once, the longest counts.
        (Segment(((_COMPUTE, 1),), members=16), 0.02, 0.5, 0.5 * -np.expm1(-16 * 0.02)),
    ],
)
def test_what_waits_hide_of_stalls(segment, rate, size, expected):
    """Of sixteen members, where two stalls of one member are rare."""
    stalls = {"gemm": Stall(jnp.asarray(rate), LogNormal(jnp.asarray(size), jnp.asarray(1e-3)))}
    means = []
    for laws in (Variability(), Variability(stalls=stalls)):
        program = assemble(graph_of([()]), [((segment, 1),)], variability=laws, group_size=16)
        means.append(prism.simulate(program, num_samples=2**16, key=jax.random.key(0)).mean)
    assert means[1] - means[0] == pytest.approx(expected, rel=0.03, abs=1e-4)


def _mean(num_replicas: int, rates: np.ndarray) -> float:
    """The mean of the slowest of many replicas, of which each kind's stalls are Poisson: as many
    draws for each number of stalls, weighted, so that the same draws serve all rates.
    """
    rng, size, most = np.random.default_rng(0), 100_000, 3
    steps, weights = [], []
    for numbers in itertools.product(range(most + 1), repeat=2):
        step = OPS * 0.1 + 0.1 * SIGMA * np.sqrt(OPS) * rng.standard_normal(size)
        for number, median in zip(numbers, SIZES.values(), strict=True):
            lengths = median * np.exp(SPREAD * rng.standard_normal((number, size)))
            step += lengths.sum(axis=0)
        steps.append(step)
        likely = np.prod(scipy.stats.poisson.pmf(numbers, OPS / 2 * rates))
        weights.append(np.full(size, likely / size))
    steps, weights = np.concatenate(steps), np.concatenate(weights)
    order = np.argsort(steps)
    below = np.minimum(np.cumsum(weights[order]), 1) ** num_replicas
    return float(steps[order] @ np.diff(below, prepend=0))
