"""How well a predicted law of the step time agrees with measured steps."""

import dataclasses

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._summary import Column, Shown, Table
from ..law import Law
from ..random import key_data


# The number of quantiles by which a law is compared.
_NUM_QUANTILES = 4000
_RESAMPLES = 400


@dataclasses.dataclass(frozen=True, repr=False)
class Score(Shown):
    """How well a law agrees with measured steps. The noise of each figure is its standard deviation
    due to the finite number of measured steps, from resampling them.

    **Attributes:**

    - `num_steps`: how many steps were measured.
    - `values`, `noise`: each figure and its noise, by name:
        - `mean_error`, `p95_error`: predicted over measured, minus one.
        - `std_ratio`: predicted over measured; `nan` if all measured steps are equal.
        - `ks`, `ks_aligned`: the Kolmogorov-Smirnov distance, as it is and with the median of the
            measured steps shifted to that of the law.
        - `w1_s`, `crps_s`: the Wasserstein-1 distance and the continuous ranked probability score,
            in seconds.
        - `coverage_90`: the share of measured steps between the predicted 5 % and 95 % quantiles.
    """

    num_steps: int
    values: dict[str, float]
    noise: dict[str, float]

    def summary(self) -> Table:
        rows = [
            {"score": name, "value": value, "noise": self.noise[name]}
            for name, value in self.values.items()
        ]
        title = f"Score of a law against {self.num_steps:,} measured steps"
        columns = ("score", *(Column(name, error="noise") for name in ("value", "noise")))
        return Table(columns, rows, title)


def score(law: Law, measured: Float[np.ndarray, " steps"], *, key: PRNGKeyArray) -> Score:
    """Compares a law with measured step times.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: step times, in seconds.
    - `key`: a `jax.random` key for resampling.

    **Returns:**

    A [`Score`][].

    **Raises:**

    `ValueError` for fewer than two measured steps, or a step that is not a positive number.
    """
    measured = np.asarray(measured, float)
    if measured.ndim != 1 or len(measured) < 2:
        raise ValueError("Measured steps must be a list of at least two step times, in seconds.")
    if not np.all(np.isfinite(measured) & (measured > 0)):
        raise ValueError("Every measured step time must be a positive number of seconds.")
    quantiles = np.asarray(law.quantile((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES))
    rng = np.random.default_rng(np.asarray(key_data(key)))
    with np.errstate(over="ignore", invalid="ignore"):  # Squares of absurd steps are infinite.
        values = _figures(law, quantiles, measured)
        again = [
            _figures(law, quantiles, rng.choice(measured, len(measured))) for _ in range(_RESAMPLES)
        ]
        noise = {name: _scatter([figures[name] for figures in again]) for name in values}
    return Score(len(measured), values, noise)


def _scatter(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.std(finite)) if finite else np.nan


def _figures(law: Law, quantiles: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    shift = np.median(quantiles) - np.median(measured)
    low, high = law.quantile(0.05), law.quantile(0.95)
    spread = np.std(measured, ddof=1)
    return {
        "mean_error": float(law.mean / measured.mean() - 1),
        "p95_error": float(high / np.quantile(measured, 0.95) - 1),
        "std_ratio": float(law.std / spread) if spread > 0 else np.nan,
        "ks": ks_distance(quantiles, measured),
        "ks_aligned": ks_distance(quantiles, measured + shift),
        "w1_s": _w1(quantiles, measured),
        "crps_s": crps(quantiles, measured),
        "coverage_90": float(np.mean((measured >= low) & (measured <= high))),
    }


def ks_distance(quantiles: np.ndarray, measured: np.ndarray) -> float:
    """The largest difference between the distribution function with these sorted, evenly spaced
    quantiles and that of the measured values.
    """
    points = np.concatenate([quantiles, measured])
    ordered = np.sort(measured)
    gap = 0.0
    for side in ("left", "right"):
        one = np.searchsorted(quantiles, points, side) / len(quantiles)
        other = np.searchsorted(ordered, points, side) / len(ordered)
        gap = max(gap, float(np.max(np.abs(one - other))))
    return gap


def _w1(quantiles: np.ndarray, measured: np.ndarray) -> float:
    levels = (np.arange(len(quantiles)) + 0.5) / len(quantiles)
    positions = np.minimum((levels * len(measured)).astype(int), len(measured) - 1)
    return float(np.mean(np.abs(quantiles - np.sort(measured)[positions])))


def crps(quantiles: np.ndarray, measured: np.ndarray) -> float:
    """The mean continuous ranked probability score of a law, given as evenly spaced quantiles, at
    measured values: `E|X - y| - E|X - X'| / 2`, in their unit. Smaller is better.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """
    m = len(quantiles)
    total = np.concatenate([[0.0], np.cumsum(quantiles)])
    below = np.searchsorted(quantiles, measured)
    distance = measured * (2 * below - m) + total[-1] - 2 * total[below]
    weights = 2 * np.arange(1, m + 1) - m - 1
    return float(np.mean(distance) / m - np.sum(weights * quantiles) / m**2)
