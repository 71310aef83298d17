"""The family of laws that best fits the residuals of a kind of op."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float
from scipy.special import ndtri

from ..host import on_host
from ..latency import AbstractLatency, families, fit_latency, make_latency
from ..law import crps


# Families are tried from the simplest on, then those of other packages; a later family must be
# better by this share.
BETTER = 1e-3
_SIMPLEST = ("lognormal", "normal", "gamma", "shifted-lognormal", "weibull")
LEVELS = (np.arange(201) + 0.5) / 201
# How many quantiles are computed together: many more would not fit into the caches.
_TOGETHER = 32_768


def best_family(ratios: Float[np.ndarray, "ops steps"]) -> tuple[str, dict[str, float]]:
    """The family that predicts the odd steps best from the even ones, and the reverse."""
    halves = halves_of(ratios)
    everything = np.concatenate(halves)
    if len(everything) < 4 or np.std(everything) < 1e-6 or min(map(len, halves)) < 2:
        return "constant", {}
    best: tuple[float, str, dict[str, float]] | None = None
    for family in sorted(families(), key=lambda name: (*_SIMPLEST, name).index(name)):
        found = fit_latency(family, everything)
        if found is None:
            continue
        total = score_of_family(halves, family)
        if best is None or total < best[0] * (1 - BETTER):
            best = (total, family, found)
    return best[1:] if best else ("constant", {})


def halves_of(ratios: Float[np.ndarray, "ops steps"]) -> list[np.ndarray]:
    """The present values of even steps, and of odd steps."""
    halves = [ratios[:, ::2], ratios[:, 1::2]]
    return [half[np.isfinite(half) & (half > 0)] for half in halves]


def score_of_family(halves: list[np.ndarray], family: str) -> float:
    """The `held_score` of a family; infinite if it cannot have the moments of a half."""

    def predicted(fitted: np.ndarray) -> np.ndarray | None:
        parameters = fit_latency(family, fitted)
        if parameters is None:
            return None
        return factors_at(family, parameters, LEVELS) * fitted.mean()

    return held_score(halves, predicted)


def held_score(
    halves: list[np.ndarray], predict: Callable[[np.ndarray], np.ndarray | None]
) -> float:
    """How well each half is predicted from the other: twice the CRPS. `predict` returns quantiles
    at `LEVELS`, or `None` if it cannot.
    """
    total = 0.0
    for fitted, held in (halves, halves[::-1]):
        quantiles = predict(fitted)
        if quantiles is None:
            return np.inf
        total += crps(quantiles, held[:: max(len(held) // 2000, 1)])
    return total


def factors_at(
    family: str, parameters: dict[str, float], levels: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """The quantiles of a factor of mean one, in double precision."""
    with jax.enable_x64(True):
        law, scores = make_latency(family, parameters), ndtri(levels).reshape(-1)
        parts = np.array_split(scores, -(-len(scores) // _TOGETHER) or 1)
        found = [np.asarray(on_host(_relative, law, part)) for part in parts]
    return np.concatenate(found).reshape(levels.shape)


def _relative(law: AbstractLatency, z: Float[Array, " scores"]) -> Float[Array, " scores"]:
    return law.from_normal(z) / law.mean()
