"""How well a predicted law of the step time agrees with measured steps."""

import dataclasses

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from .._summary import Column, Shown, Table
from ..law import Law, crps, ks_distance, quantiles, wasserstein
from ..random import key_data


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
    predicted = quantiles(law)
    rng = np.random.default_rng(np.asarray(key_data(key)))
    with np.errstate(over="ignore", invalid="ignore"):  # Squares of absurd steps are infinite.
        values = _figures(law, predicted, measured)
        again = [
            _figures(law, predicted, rng.choice(measured, len(measured))) for _ in range(_RESAMPLES)
        ]
        noise = {name: _scatter([figures[name] for figures in again]) for name in values}
    return Score(len(measured), values, noise)


def _scatter(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.std(finite)) if finite else np.nan


def _figures(law: Law, predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    shift = np.median(predicted) - np.median(measured)
    low, high = law.quantile(0.05), law.quantile(0.95)
    spread = np.std(measured, ddof=1)
    return {
        "mean_error": float(law.mean / measured.mean() - 1),
        "p95_error": float(high / np.quantile(measured, 0.95) - 1),
        "std_ratio": float(law.std / spread) if spread > 0 else np.nan,
        "ks": ks_distance(predicted, measured),
        "ks_aligned": ks_distance(predicted, measured + shift),
        "w1_s": float(wasserstein(predicted, measured)),
        "crps_s": crps(predicted, measured),
        "coverage_90": float(np.mean((measured >= low) & (measured <= high))),
    }
