"""Derivatives of quantiles and exceedances of steps, of which a third are in a second mode, against
closed forms: integrals over the factor of a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from scipy.special import factorial, ndtr

from prism_jax.analysis import Exceedance, Quantile
from prism_jax.analysis._derivative import figure_gradient
from prism_jax.analysis._figure import figure_of
from prism_jax.engine import simulated_steps
from prism_jax.latency import LogNormal
from prism_jax.program import Network, Stall, Variability
from prism_jax.program._assemble import assemble
from prism_jax.workload import Kernel, Segment

from .helpers import graph_of, lognormal


# Sigmas of the kernel, of the step's factor and of the size of a stall.
_OWN, _STEP, _SIZE = 0.004, 0.01, 0.02
_SHARE, _SAMPLES, _KEYS = 1 / 3, 64_000, range(2)
_Z = np.linspace(-7, 7, 561)
_WEIGHTS = np.exp(-(_Z**2) / 2) / np.exp(-(_Z**2) / 2).sum()


def _stalls(time, replicas, later, step, rate):
    """P(a step takes at most `time`), where each replica stalls for `later` seconds with a rate."""
    kernels, k = time / np.exp(step * _Z - step**2 / 2), np.arange(12)[:, None]
    mean = 1 + k * later * np.exp(_SIZE**2 / 2)
    sizes = k * later**2 * np.exp(_SIZE**2) * np.expm1(_SIZE**2)
    scores = (kernels - mean) / np.sqrt(np.expm1(_OWN**2) + sizes)
    chances = np.exp(-rate) * rate**k / factorial(k)
    below = np.sum(chances * ndtr(scores), axis=0)
    return _WEIGHTS @ below**replicas


def _congestion(time, replicas, later, step, rate):
    """The same, where with the probability `rate` all take `later` times longer."""
    kernels, calm = time / np.exp(step * _Z - step**2 / 2), 1 / (1 + rate * later)
    modes = (1 - rate, calm), (rate, calm * (1 + later))
    scores = ((p, (np.log(kernels / f) + _OWN**2 / 2) / _OWN) for p, f in modes)
    return sum(p * (_WEIGHTS @ ndtr(z) ** replicas) for p, z in scores)


def _program(below, replicas, later, rate):
    laws = {"residual": {"gemm": lognormal(_OWN)}, "step": lognormal(_STEP)}
    if below is _stalls:
        size = LogNormal(jnp.asarray(later), jnp.asarray(_SIZE))
        laws["stalls"] = {"gemm": Stall(jnp.asarray(rate), size)}
    else:
        laws["network"] = Network(jnp.asarray(rate), jnp.asarray(1 + later))
    block = ((Segment(((Kernel("gemm", "one", 1.0, link="network"), 1),)), 1),)
    options = {"num_replicas": replicas, "network_links": ("network",)}
    return assemble(graph_of([()]), [block], variability=Variability(**laws), **options)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 16, 128])
@pytest.mark.parametrize("later", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("below", [_stalls, _congestion])
def test_derivatives_near_a_second_mode(below, later, replicas):
    """By the spread of the step's factor, and by the rate of stalls or congestion."""
    rate = _SHARE if below is _congestion else -np.log1p(-_SHARE) / replicas
    program, usual = _program(below, replicas, later, rate), np.array([_STEP, rate])

    def quantile(level, values):
        def excess(time):
            return below(time, replicas, later, *values) - level

        return scipy.optimize.root_scalar(excess, bracket=(0.2, 40)).root

    threshold = quantile(0.6, usual)
    figures = [
        (Quantile(0.5), lambda values: quantile(0.5, values)),
        (Quantile(0.9), lambda values: quantile(0.9, values)),
        (Exceedance(threshold), lambda values: 1 - below(threshold, replicas, later, *values)),
    ]
    keys = map(jax.random.key, _KEYS)
    steps = [simulated_steps(program, num_samples=_SAMPLES, key=key) for key in keys]
    for objective, exact in figures:
        found = []
        for simulated in steps:
            of: Any = figure_gradient(figure_of(simulated, objective)).variability
            by_rate = of.stalls["gemm"].rate if below is _stalls else of.network.probability
            found.append([float(of.step.sigma), float(by_rate)])
        for k, value in enumerate(np.mean(found, axis=0)):
            change = usual * 0.01 * (np.arange(2) == k)
            slope = (exact(usual + change) - exact(usual - change)) / (2 * change[k])
            assert value == pytest.approx(slope, rel=0.05), (str(objective), k)
