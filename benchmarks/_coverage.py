"""How often 95 % intervals contain the truth."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.stats import norm, poisson

import prism_jax as prism
from prism_jax.analysis import CVaR, Exceedance, Mean, Quantile, Std
from prism_jax.analysis._derivative import figure_gradients
from prism_jax.analysis._figure import dependence_of, figure, figure_value
from prism_jax.analysis._jackknife import Jackknifed
from prism_jax.engine import simulated_steps
from prism_jax.latency import Gamma, LogNormal, Normal, Weibull
from prism_jax.program import Network, Stall, Variability
from prism_jax.schedule import GPipe, InterleavedOneFOneB, OneFOneB
from tests.helpers import lognormal, one_kernel, pipeline_program
from validation.tables import table


def programs() -> dict[str, Any]:
    """Small graphs with all that a program may have."""
    shared = {"rank": lognormal(0.02), "step": lognormal(0.01), "microbatch": lognormal(0.03)}
    own = {"step": lognormal(0.01)}
    stalls = {"gemm": Stall(jnp.asarray(2e-3), lognormal(0.5))}
    # One kind is long and the other short.
    two = {**stalls, "send_recv": Stall(jnp.asarray(4e-3), LogNormal(0.1, 0.5))}
    congested = {"network": Network(jnp.asarray(0.2), jnp.asarray(2.0)), "stalls": two}
    families = {"log-normal": LogNormal(1.0, 0.08), "normal": Normal(1.0, 0.08)}
    families |= {"gamma": Gamma(1.0, 0.08), "weibull": Weibull(1.0, 12.0)}
    noise = {"gemm": lognormal(0.08), "send_recv": lognormal(0.3)}
    tail = {"tail": one_kernel("optimizer", 1.0)}
    reduction = one_kernel("reduce_scatter", 0.5, "network")
    both = {**tail, "reduction": reduction, "network_links": ("network",)}
    of_64 = {"num_replicas": 64}

    def made(schedule, laws: Any = None, residual: Any = noise, **options):
        variability = Variability(residual=residual, **(laws or {}))
        return pipeline_program(schedule, variability=variability, **options)

    pipeline, interleaved = OneFOneB(3, 4), InterleavedOneFOneB(3, 6, 2)
    long_tail, of_two = {**noise, "optimizer": lognormal(0.3)}, own | {"stalls": two}
    everything = shared | congested
    return {
        **{f"chain, {n}": made(GPipe(1, 6), None, {"gemm": law}) for n, law in families.items()},
        "diamond": made(GPipe(2, 2)),
        "ties: nothing varies but a factor": made(pipeline, {"step": lognormal(0.02)}, {}),
        "1f1b": made(pipeline),
        "1f1b, random tail": made(pipeline, None, long_tail, **tail),
        "1f1b, shared factors": made(pipeline, shared, **both),
        "1f1b, stalls": made(pipeline, own | {"stalls": stalls}, **both),
        "1f1b, two kinds of stalls": made(pipeline, of_two, **tail),
        "1f1b, two kinds of stalls, 64 replicas": made(pipeline, of_two, **of_64, **tail),
        "1f1b, everything, 16 replicas": made(pipeline, everything, num_replicas=16, **both),
        "interleaved, 64 replicas": made(interleaved, shared, **of_64, **both),
    }


# Estimators by the objective, and by the draw that a figure's derivative leaves open.
NAMES = {"Mean": "mean: pathwise", "Std": "standard deviation: pathwise"}
NAMES |= {f"Quantile{draw}": f"quantile: given all but the {draw}" for draw in ("step", "tail")}
NAMES["Quantile"] = "quantile: local linear regression"
NAMES["CVaR"] = "CVaR: pathwise beyond the quantile"
NAMES |= {f"Exceedance{draw}": f"exceedance: given all but the {draw}" for draw in ("step", "tail")}
NAMES["Exceedance"] = "exceedance: density and regression"
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
    exceedance = dependence_of(found, found.value).simulated.exceedance
    last = exceedance.last if exceedance else ""
    return NAMES[type(objective).__name__ + last]


def repeated(analysis: Any, seeds: Iterable[int]) -> dict[str, Float[np.ndarray, "seeds 3"]]:
    """The value of each figure of an analysis and its interval, for each seed."""
    runs = [analysis(seed) for seed in seeds]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}


def coverage(found: Float[np.ndarray, "seeds 3"], truth: float) -> tuple[float, float]:
    """How often the intervals that are given contain the truth, and the share of the others."""
    _, low, high = found.T
    known = ~np.isnan(low)
    held = ((low <= truth) & (truth <= high))[known]
    return float(held.mean()) if len(held) else np.nan, 1 - float(known.mean())


def coverage_table(repetitions: int, of: str | None = None) -> str:
    """Of estimates and their derivatives, and of `sensitivity`; `of` one of these. In Markdown."""
    cells = []
    for name, rows_of in KINDS.items():
        for what, found, truth in rows_of(repetitions) if of in (None, name) else ():
            held, withheld = coverage(found, truth)
            # In units of the scatter; its own standard error is one over the root of repetitions.
            bias = np.mean(found[:, 0] - truth) / np.std(found[:, 0])
            cells.append((what, f"{held:.3f}", f"{withheld:.0%}", f"{bias:+.2f}"))
            print(*cells[-1], file=sys.stderr, flush=True)  # Some take a while.
    return table(("figure", "coverage", "withheld", "bias"), cells)


def _covered(analysis, num_samples: int, repetitions: int, truth: Any = None) -> Iterator[Any]:
    """Each figure of an analysis, repeated; its truth is by default what a long analysis finds."""

    def estimates(seed: int, times: int = 1) -> dict[str, Any]:
        found = analysis(times * num_samples, jax.random.key(seed))
        return {name: (one.value, *one.interval()) for name, one in found.items()}

    truth = truth or {name: value for name, (value, *_) in estimates(0, _LONGER).items()}
    found = repeated(estimates, range(1, 1 + repetitions))
    return ((name, found[name], truth[name]) for name in truth)


def _of_estimators(repetitions: int) -> Iterator[Any]:
    """Of value and derivative, by objective."""
    cases = [("chain, log-normal", o) for o in (Mean(), Std(), Quantile(0.9), CVaR(0.9), None)]
    for name, objective in (*cases, ("1f1b, random tail", None)):
        program = programs()[name]
        if objective is None:
            steps = simulated_steps(program, num_samples=2**16, key=jax.random.key(0)).steps
            objective = Exceedance(float(np.quantile(steps, 0.9)))
        probe = figure(program, objective, num_samples=_STEPS, key=jax.random.key(0))
        label = name_of(objective, probe)

        def both(num_samples, key, program=program, objective=objective, label=label):
            found = figure(program, objective, num_samples=num_samples, key=key)
            slopes, rests_on = figure_gradients(found)
            law: Any = slopes.variability.residual["gemm"]
            sigmas = np.asarray(law.sigma)[:, None]
            derivative = Jackknifed(sigmas[0], sigmas[1:], np.array([rests_on]))
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
        laws: Any = {"rank": lognormal(_RANK), "step": lognormal(_STEP)}
        laws["residual"] = dict.fromkeys("abc", Normal(1.0, _SIGMA))
        laws["stalls"] = {"c": Stall(jnp.asarray(_STALLS / num_replicas), LogNormal(*_SIZE))}
        variability = Variability(**laws)
        program = prism.compile_graph(ops, variability=variability, num_replicas=num_replicas)
        name, p95 = f"R = {num_replicas}: {{}}".format, _p95(num_replicas)
        truth = {name("p95"): p95, name("mean of a"): _slope(num_replicas, "mean")}
        for part, law in parts.items():
            truth[name(f"spread of {part}")] = _slope(num_replicas, law)
            truth[name(f"gain of {part}")] = p95 - _p95(num_replicas, **{law: 0.0})

        def sensitivity(count, key, program=program, name=name):
            keys = {"num_samples": count, "key": key, "parts": [*parts]}
            found = prism.sensitivity(program, prism.Quantile(0.95), **keys)
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


def _p95(num_replicas: int, *, mean=1.0, sigma=1.0, rank=1.0, step=1.0, rate=1.0) -> float:
    """The p95 of the step of `_of_sensitivity`, by numerical integration, with factors on the mean
    and the spread of op `a`, on the spread of the GPU's and of the step's factor, or on the rate of
    stalls.
    """
    z, weight = np.polynomial.hermite_e.hermegauss(40)
    weight = weight / weight.sum()
    gpus, steps = (np.exp(s * z - s**2 / 2) for s in (_RANK * rank, _STEP * step))
    std = _SIGMA * np.sqrt((mean * sigma) ** 2 + 2)
    size = _SIZE[0] * np.exp(_SIZE[1] * z)
    two = np.add.outer(size, size).ravel()
    stalls = [(np.zeros(1), np.ones(1)), (size, weight), (two, np.outer(weight, weight).ravel())]
    chances = poisson.pmf([0, 1, 2], _STALLS / num_replicas * rate)

    def until(t):  # The distribution function of one replica's end.
        total = 0.0
        for chance, (seconds, shares) in zip(chances / chances.sum(), stalls, strict=True):
            left = np.subtract.outer(t, seconds)[..., None]
            score = (left - gpus * (mean + 2)) / (gpus * std)
            total = total + chance * (norm.cdf(score) @ weight @ shares)
        return total

    def missing(t):
        return weight @ until(t / steps) ** num_replicas - 0.95

    found: Any = brentq(missing, 2.0, 6.0, xtol=1e-12)
    return found


KINDS: Any = {"estimators": _of_estimators, "sensitivities": _of_sensitivity}
