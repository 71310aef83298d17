"""How often 95 % intervals contain the truth."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm, poisson

import prism_jax as prism
from prism_jax.analysis import CVaR, Exceedance, Mean, Quantile, Std, _estimate
from prism_jax.analysis._bootstrap import Bootstrapped
from prism_jax.analysis._estimate import figure, figure_value, gradients
from prism_jax.engine import simulated_steps
from prism_jax.latency import LogNormal, Normal
from prism_jax.program import Stall, Variability
from tests.helpers import lognormal

from ._programs import programs
from ._tables import table


# Estimators by the objective, and by the draw that a figure's derivative leaves open.
NAMES = {
    "Mean": "mean: pathwise",
    "Std": "standard deviation: pathwise",
    "Quantilestep": "quantile: given all but the step",
    "Quantiletail": "quantile: given all but the tail",
    "Quantile": "quantile: local linear regression",
    "CVaR": "CVaR: pathwise beyond the quantile",
    "Exceedancestep": "exceedance: given all but the step",
    "Exceedancetail": "exceedance: given all but the tail",
    "Exceedance": "exceedance: density and regression",
}
_STEPS = 2**14
# The truth is of so many times as many steps.
_LONGER = 64
# Enough of the slowest of so many replicas for intervals.
_STEPS_OF = {1: 2**13, 64: 2**14, 128: 2**15}
# Of `_of_sensitivity`: the spreads of ops and factors, the stalls of a step, and the median and the
# spread of their size, in seconds.
_SIGMA, _RANK, _STEP, _STALLS, _SIZE = 0.05, 0.01, 0.005, 0.02, (0.1, 0.5)


def name_of(objective: Any, found: Any) -> str:
    """The estimator of an objective's derivative."""
    return NAMES[type(objective).__name__ + (_estimate.conditional_on(found) or "")]


def coverage_table(repetitions: int, of: str | None = None) -> str:
    """Of estimates and their derivatives, and of `sensitivity`; `of` one of these. In Markdown."""
    cells = []
    for name, rows_of in KINDS.items():
        for what, held, errors in rows_of(repetitions) if of in (None, name) else ():
            coverage = f"{np.mean(held) if held else np.nan:.3f}"
            # In units of the scatter; its own standard error is one over the root of repetitions.
            bias = f"{np.mean(errors) / np.std(errors):+.2f}"
            cells.append((what, coverage, f"{1 - len(held) / repetitions:.0%}", bias))
            print(*cells[-1], file=sys.stderr, flush=True)  # Some take a while.
    return table(("figure", "coverage", "withheld", "bias"), cells)


def _of_estimators(repetitions: int) -> Iterator[Any]:
    """Of value and derivative, by objective."""
    cases = [("chain, log-normal", o) for o in (Mean(), Std(), Quantile(0.9), CVaR(0.9), None)]
    cases.append(("1f1b, random tail", None))
    for name, objective in cases:
        program = programs()[name]
        if objective is None:
            steps = simulated_steps(program, num_samples=2**16, key=jax.random.key(0)).steps
            objective = Exceedance(float(np.quantile(steps, 0.9)))
        probe = figure(program, objective, num_samples=_STEPS, key=jax.random.key(0))
        label = name_of(objective, probe)

        def both(num_samples, key, program=program, objective=objective, label=label):
            found = figure(program, objective, num_samples=num_samples, key=key)
            slopes, rests_on = gradients(found)
            sigmas: Any = [one.variability.residual["gemm"] for one in slopes]
            sigmas = np.array([[float(law.sigma)] for law in sigmas])
            derivative = Bootstrapped(sigmas[0], sigmas[1:], np.array([rests_on]))
            estimates = (*figure_value(found).estimates(), *derivative.estimates())
            return dict(zip((f"{label}: value", f"{label}: derivative"), estimates, strict=True))

        yield from _covered(both, 2**15, repetitions)


def _of_sensitivity(repetitions: int) -> Iterator[Any]:
    """Of p95 of three ops one after the other, with factors and stalls, for some numbers of
    replicas. A replica stalls so seldom that a step hardly does, too. The truth is an integral.
    """
    ops = [prism.Op(1.0, kind=kind, after=[*range(i)][-1:]) for i, kind in enumerate("abc")]
    parts = {"a": "sigma", "rank": "rank", "step": "step", "stalls of c": "rate"}
    for num_replicas, num_samples in _STEPS_OF.items():
        variability = Variability(
            residual=dict.fromkeys("abc", Normal(1.0, _SIGMA)),
            rank=lognormal(_RANK),
            step=lognormal(_STEP),
            stalls={"c": Stall(jnp.asarray(_STALLS / num_replicas), LogNormal(*_SIZE))},
        )
        program = prism.compile_graph(ops, variability=variability, num_replicas=num_replicas)
        name = f"R = {num_replicas}: {{}}".format
        truth = {name("p95"): _p95(num_replicas)}
        truth[name("mean of a")] = _slope(num_replicas, "mean")
        for part, law in parts.items():
            truth[name(f"spread of {part}")] = _slope(num_replicas, law)
            gain = _p95(num_replicas) - _p95(num_replicas, **{law: 0.0})
            truth[name(f"gain of {part}")] = gain

        def sensitivity(count, key, program=program, name=name):
            options = {"num_samples": count, "key": key, "parts": [*parts]}
            found = prism.sensitivity(program, prism.Quantile(0.95), **options)
            rows = {name("p95"): found.value}
            for part in found.parts:
                for field in ("mean", "spread", "gain") if part.name in parts else ():
                    if (one := getattr(part, field)) is not None:
                        rows[name(f"{field} of {part.name}")] = one
            return rows

        yield from _covered(sensitivity, num_samples, repetitions, truth)


def _slope(num_replicas: int, law: str) -> float:
    """The derivative of p95 with respect to a factor of one on a law."""
    high, low = (_p95(num_replicas, **{law: 1 + by}) for by in (1e-3, -1e-3))
    return (high - low) / 2e-3


def _p95(num_replicas: int, **factors: float) -> float:
    """The p95 of the step of `_of_sensitivity`, by numerical integration, with factors on the mean
    and the spread of op `a`, on the spread of the GPU's and of the step's factor, or on the rate of
    stalls.
    """
    of = {"mean": 1.0, "sigma": 1.0, "rank": 1.0, "step": 1.0, "rate": 1.0} | factors
    z, weight = np.polynomial.hermite_e.hermegauss(40)
    weight = weight / weight.sum()

    def log_normal(sigma):
        return np.exp(sigma * z - sigma**2 / 2)

    gpu, step = log_normal(_RANK * of["rank"]), log_normal(_STEP * of["step"])
    mean = of["mean"] + 2
    std = _SIGMA * np.sqrt((of["mean"] * of["sigma"]) ** 2 + 2)
    size = _SIZE[0] * np.exp(_SIZE[1] * z)
    two = np.add.outer(size, size).ravel()
    stalls = [(np.zeros(1), np.ones(1)), (size, weight), (two, np.outer(weight, weight).ravel())]
    chances = poisson.pmf([0, 1, 2], _STALLS / num_replicas * of["rate"])

    def until(t):  # The distribution function of one replica's end.
        total = 0.0
        for chance, (seconds, shares) in zip(chances / chances.sum(), stalls, strict=True):
            score = (np.subtract.outer(t, seconds)[..., None] - gpu * mean) / (gpu * std)
            total = total + chance * (norm.cdf(score) @ weight @ shares)
        return total

    def missing(t):
        return weight @ until(t / step) ** num_replicas - 0.95

    found: Any = brentq(missing, 2.0, 6.0, xtol=1e-12)
    return found


def _covered(
    analysis: Callable[..., dict[str, Any]],
    num_samples: int,
    repetitions: int,
    truth: dict[str, float] | None = None,
) -> Iterator[tuple[str, list[bool], list[float]]]:
    """Of each figure of an analysis, whether the intervals that are given contain the truth, and
    the errors of all; the truth is by default what a long analysis finds.
    """
    if truth is None:
        long = analysis(_LONGER * num_samples, jax.random.key(0))
        truth = {name: estimate.value for name, estimate in long.items()}
    held: dict[str, list[bool]] = {name: [] for name in truth}
    errors: dict[str, list[float]] = {name: [] for name in truth}
    for seed in range(repetitions):
        for name, estimate in analysis(num_samples, jax.random.key(1 + seed)).items():
            errors[name].append(estimate.value - truth[name])
            low, high = estimate.interval()
            if low == low:
                held[name].append(low <= truth[name] <= high)
    return ((name, held[name], errors[name]) for name in truth)


KINDS: dict[str, Callable[[int], Iterable[Any]]] = {
    "estimators": _of_estimators,
    "sensitivities": _of_sensitivity,
}
