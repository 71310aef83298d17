"""The family of laws that best fits the residuals of a kind of op."""

import functools as ft
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from .._misc import bisect
from ..analysis import crps


# Families are tried from the simplest on; a later family must be better by this share.
BETTER = 1e-3
_FAMILIES = ("lognormal", "normal", "gamma", "shifted-lognormal", "weibull")
LEVELS = (np.arange(201) + 0.5) / 201
_HALVINGS = 60


def best_family(ratios: Float[np.ndarray, "ops steps"]) -> tuple[str, dict[str, float]]:
    """The family that predicts the odd steps best from the even ones, and the reverse."""
    halves = halves_of(ratios)
    everything = np.concatenate(halves)
    if len(everything) < 4 or np.std(everything) < 1e-6 or min(map(len, halves)) < 2:
        return "constant", {}
    best: tuple[float, str, dict[str, float]] | None = None
    for family in _FAMILIES:
        found = _moments(family, everything)
        if found is None:
            continue
        total = held_score(halves, ft.partial(predicted, family))
        if best is None or total < best[0] * (1 - BETTER):
            best = (total, family, found)
    return best[1:] if best else ("constant", {})


def halves_of(ratios: Float[np.ndarray, "ops steps"]) -> list[np.ndarray]:
    """The present values of even steps, and of odd steps."""
    halves = [ratios[:, ::2], ratios[:, 1::2]]
    return [half[np.isfinite(half) & (half > 0)] for half in halves]


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


def predicted(family: str, fitted: np.ndarray) -> np.ndarray | None:
    parameters = _moments(family, fitted)
    if parameters is None:
        return None
    return family_quantiles(family, parameters, LEVELS) * fitted.mean()


def family_quantiles(family: str, parameters: dict[str, float], levels: np.ndarray) -> np.ndarray:
    """The quantiles of a factor of mean one. As in `latency`, but without compiling anything."""
    from scipy import stats

    if family == "gamma":
        shape = parameters["cv"] ** -2
        return stats.gamma.ppf(levels, shape, scale=1 / shape)
    if family == "weibull":
        law = stats.weibull_min(parameters["shape"])
        return law.ppf(levels) / law.mean()
    scores = stats.norm.ppf(levels)
    if family == "normal":
        return 1 + parameters["std"] * scores
    sigma, shift = parameters["sigma"], parameters.get("shift", 0.0)
    return (shift + np.exp(sigma * scores)) / (shift + np.exp(sigma**2 / 2))


def _moments(family: str, ratios: np.ndarray) -> dict[str, float] | None:
    """The parameters of a family, by moments; `None` if it cannot have these moments."""
    values = ratios / ratios.mean()
    cv = float(np.std(values))
    if cv <= 0:
        return None
    if family == "lognormal":
        return {"sigma": float(np.sqrt(np.log1p(cv**2)))}
    if family == "normal":
        return {"std": cv} if cv < 0.2 else None
    if family == "gamma":
        return {"cv": cv}
    if family == "weibull":
        shape = cv**-1.086  # Its error is small for CVs from 0.01 to 1 (Justus et al. 1978).
        return {"shape": shape}
    skewness = float(np.mean((values - 1) ** 3)) / cv**3
    if not 0.05 < skewness < 20:
        return None

    # The skewness of a log-normal is (w + 2) sqrt(w - 1), w = exp(sigma^2).
    def is_low(sigma: float) -> bool:
        w = np.exp(sigma**2)
        return bool((w + 2) * np.sqrt(w - 1) <= skewness)

    sigma = sum(bisect(is_low, 1e-6, 4.0, _HALVINGS)) / 2
    w = np.exp(sigma**2)
    median = cv / np.sqrt(w * (w - 1))
    shift = 1 - median * np.sqrt(w)
    if shift < 0 or median <= 0:
        return None
    return {"sigma": sigma, "shift": float(shift / median)}
