"""The laws of a traced job's kernels and of its microbatches' data, from its components. Families
compete: the one that predicts steps best that it was not fitted to is taken.
"""

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.special import ndtri

from ..data import Variation
from ..host import on_host
from ..latency import AbstractLatency, families, fit_latency, make_latency
from ..law import crps
from ._clean import Clean
from ._components import Apart, Split
from ._observe import Seen
from ._step_graph import ByKind


# Families are tried from the simplest on, then those of other packages; a later family must be
# better by this share.
_BETTER = 1e-3
_SIMPLEST = ("lognormal", "normal", "gamma", "shifted-lognormal", "weibull")
_LEVELS = (np.arange(201) + 0.5) / 201
# How many quantiles are computed together: many more would not fit into the caches.
_TOGETHER = 32_768
# The number of values in a table of quantiles, and the most factors in sets.
_QUANTILES = 1024
_MOST_FACTORS = 2**17
# The parts into which steps are divided to estimate the scatter of a score.
_BLOCKS = 10
# The standard errors from which a difference is significant.
_SEEN = 3.0

Sets = tuple[tuple[float, ...], ...]


def fit_laws(seen: Seen, clean: Clean, split: Split) -> tuple[tuple[Variation, ...], Sets]:
    """Fits the laws of components, of the residual of each kind of op, and of the data. The sets of
    factors are in place of a law of data, if any.
    """
    of_data, sets = law_of_data(split.apart, seen.trace.steps, seen.source)
    of_kernels = laws_of_kernels(seen, clean.body, split.mean, split.apart)
    return (*of_data, *of_kernels, *clean.stalls), sets


def laws_of_kernels(seen: Seen, body: ByKind, means: ByKind, apart: Apart) -> tuple[Variation, ...]:
    """The laws of the factors that kernels share, and of the residual of each kind of op.

    **Arguments:**

    - `body`, `means`: the latencies of ops without stalls, which are `nan`, and the means of kinds
        on workers.
    - `apart`: the components of the latencies of compute.
    """
    step, source = seen.step, seen.source
    shared = [
        Variation("", name, "lognormal", {"sigma": apart.spread[name]}, source)
        for name in ("step", "worker_step")
        if apart.spread[name]
    ]
    residuals = []
    for kind, latencies in body.items():
        if kind in step.phases:
            factors = np.exp(apart.residual[:, :, step.phases.index(kind)])
        else:
            factors = latencies / np.where(means[kind] > 0, means[kind], np.nan)
            factors = _without_step(factors, apart.spread["step"])
        factors = factors[step.places[kind]]
        factors = factors[:, ~np.isnan(factors).all(axis=0)]
        family, parameters = best_family(factors)
        if family != "constant":
            residuals.append(Variation(kind, "residual", family, parameters, source))
    return (*shared, *residuals)


def _without_step(ratios: np.ndarray, sigma: float) -> np.ndarray:
    """Ratios that are narrower by the factor of steps, which multiplies every op."""
    if np.isnan(ratios).all() or not np.nanvar(ratios):
        return ratios
    centre = np.nanmean(ratios)
    share = sigma**2 / (np.nanvar(ratios) / centre**2)
    return centre + (ratios - centre) * np.sqrt(max(1 - share, 0.0))


def law_of_data(
    apart: Apart, steps: Int[np.ndarray, " steps"], source: str
) -> tuple[tuple[Variation, ...], Sets]:
    """The law of the factor of a microbatch, or sets of factors instead; see `Profile`.

    - Microbatches of a replica's step are drawn together, as traced, if this predicts the sum over
        a held-out step better than independent draws do, by one standard error of the CRPS.
    - Otherwise, the family that best predicts the factors of held-out steps is used, or a table of
        their quantiles.
    """
    sigma = apart.spread["microbatch"]
    if not sigma:
        return (), ()
    factor = np.moveaxis(apart.data.factor[:, 0, 0], 1, 2)  # Replicas, steps, microbatches.
    if _depend(factor):
        return (), _stretches(factor, steps)
    values = np.moveaxis(factor, 1, 2).reshape(-1, factor.shape[1])
    halves = halves_of(values)
    family, parameters = best_family(values)
    score, many = held_score(halves, family), min(map(len, halves)) >= _QUANTILES // 2
    if many and held_score(halves, None) < score * (1 - _BETTER):
        return (), _table(values.reshape(-1))
    if family in ("lognormal", "constant"):
        family, parameters = "lognormal", {"sigma": sigma}
    return (Variation("", "microbatch", family, parameters, source),), ()


def _depend(factor: Float[np.ndarray, "replicas steps microbatches"]) -> bool:
    """Whether other sums over a replica's step predict such sums better than independent draws."""
    if factor.shape[2] < 2 or factor.shape[0] * factor.shape[1] < 2 * _BLOCKS:
        return False
    rng, worse = np.random.default_rng(0), []
    for fitted, held in ((factor[:, ::2], factor[:, 1::2]), (factor[:, 1::2], factor[:, ::2])):
        mixed = rng.permutation(fitted.reshape(-1)).reshape(fitted.shape)
        together, apart = (np.quantile(x.sum(axis=2), _LEVELS) for x in (fitted, mixed))
        blocks = np.array_split(held.sum(axis=2).T.reshape(-1), _BLOCKS)
        worse += [crps(apart, block) - crps(together, block) for block in blocks]
    return bool(np.mean(worse) > np.std(worse, ddof=1) / np.sqrt(len(worse)))


def _stretches(
    factor: Float[np.ndarray, "replicas steps microbatches"], steps: Int[np.ndarray, " steps"]
) -> Sets:
    """Stretches of consecutive factors: those of each step or, if data continue from one step to
    the next as they do within a step, those of all steps of a replica.
    """
    replicas, number, microbatches = factor.shape
    length = microbatches
    if number > 1 and np.all(np.diff(steps) == 1) and _goes_on(factor):
        most = max(_MOST_FACTORS // (replicas * microbatches), 1)
        length *= number if number <= most else min(16, number)
    rows = factor.reshape(replicas, -1)
    rows = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    rows = rows[:: -(-rows.size // _MOST_FACTORS)]
    return tuple(tuple(np.round(row, 6).tolist()) for row in rows)


def _goes_on(factor: Float[np.ndarray, "replicas steps microbatches"]) -> bool:
    """Whether the halves of neighbouring steps are as correlated as those of one step, and the law
    of a microbatch does not depend on its place in a step.
    """
    number = factor.shape[2]
    centred = factor - factor.mean()
    halfway = number // 2
    first, last = centred[..., :halfway].sum(axis=2), centred[..., -halfway:].sum(axis=2)
    inside, across = first * last, last[:, :-1] * first[:, 1:]
    error = np.sqrt(inside.var() / inside.size + across.var() / across.size)
    places = factor.mean(axis=(0, 1)) - factor.mean()
    off = np.sum(places**2) / (factor.var() / (factor.shape[0] * factor.shape[1]))
    alike = off < number - 1 + _SEEN * np.sqrt(2 * (number - 1))
    return bool(alike and abs(across.mean() - inside.mean()) < error)


def _table(values: np.ndarray) -> Sets:
    """Means of the values of equal shares, from the smallest to the largest."""
    sums = np.concatenate([[0.0], np.cumsum(np.sort(values))])
    ends = np.linspace(0, len(values), min(len(values), _QUANTILES) + 1)
    means = np.diff(np.interp(ends, np.arange(len(sums)), sums)) / np.diff(ends)
    return tuple((round(mean, 6),) for mean in means.tolist())


def best_family(ratios: Float[np.ndarray, "... steps"]) -> tuple[str, dict[str, float]]:
    """The family that predicts the odd steps best from the even ones, and the reverse."""
    halves = halves_of(ratios)
    everything = np.concatenate(halves)
    if len(everything) < 4 or np.std(everything) < 1e-6 or min(map(len, halves)) < 2:
        return "constant", {}
    best: tuple[float, str, dict[str, float]] | None = None
    for family in sorted(families(), key=lambda name: (*_SIMPLEST, name).index(name)):
        parameters = fit_latency(family, everything)
        if parameters is None:
            continue
        total = held_score(halves, family)
        if best is None or total < best[0] * (1 - _BETTER):
            best = (total, family, parameters)
    return best[1:] if best else ("constant", {})


def halves_of(ratios: Float[np.ndarray, "... steps"]) -> list[np.ndarray]:
    """The present values of even steps, and of odd steps."""
    halves = [ratios[:, ::2], ratios[:, 1::2]]
    return [half[np.isfinite(half) & (half > 0)] for half in halves]


def held_score(halves: list[np.ndarray], family: str | None) -> float:
    """How well each half is predicted from the other by a family or, without one, by its quantiles:
    twice the CRPS; infinite for a family that cannot have the moments of a half.
    """
    total = 0.0
    for fitted, held in (halves, halves[::-1]):
        quantiles = np.quantile(fitted, _LEVELS)
        if family is not None:
            parameters = fit_latency(family, fitted)
            if parameters is None:
                return np.inf
            quantiles = factors_at(family, parameters, _LEVELS) * fitted.mean()
        total += crps(quantiles, held[:: max(len(held) // 2000, 1)])
    return total


def factors_at(
    family: str, parameters: dict[str, float], levels: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """The quantiles of a factor of mean one, in double precision."""
    with jax.enable_x64(True):
        law, scores = make_latency(family, parameters), ndtri(levels).reshape(-1)
        parts = np.array_split(scores, -(-len(scores) // _TOGETHER) or 1)
        factors = [np.asarray(on_host(_relative, law, part)) for part in parts]
    return np.concatenate(factors).reshape(levels.shape)


def _relative(law: AbstractLatency, z: Float[Array, " scores"]) -> Float[Array, " scores"]:
    return law.from_normal(z) / law.mean()
