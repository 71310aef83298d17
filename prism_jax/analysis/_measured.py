"""A law beside measured steps: figures to fit it to them, and how well it agrees with them."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._misc import as_step_times, check_unit
from .._summary import Column, Shown, Table, plain
from ..law import Law, crps, matched, quantiles, wasserstein
from ..random import key_data
from ._cells import cells_of, figures_by_counts
from ._objectives import AbstractObjective, Steps


_RESAMPLES = 400


def _ordered(measured: Any) -> tuple[float, ...]:
    values = np.sort(np.asarray(as_step_times(measured), float))
    if values.ndim != 1 or not len(values) or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError("Measured steps must be a list of positive step times, in seconds.")
    return tuple(values.tolist())


class CRPS(AbstractObjective):
    """The mean continuous ranked probability score of the law at measured step times, in seconds:
    `E|X - y| - E|X - X'| / 2`. Smaller is better. Use it to fit a law to measured step times.

    Source: Gneiting and Raftery, "Strictly proper scoring rules" (2007), eq. 21.
    """

    measured: tuple[float, ...] = eqx.field(converter=_ordered, static=True)

    def value(self, steps: Steps) -> float:
        return crps(np.sort(steps), np.array(self.measured))

    def slope(self, steps: Steps, width: float) -> Steps:
        # The distribution function of the measured steps, minus that of the steps; ties count half.
        below = _ranks(np.array(self.measured), steps) - _ranks(np.sort(steps), steps)
        return 2 * below / len(steps)

    def influence(self, steps: Steps, width: float) -> Steps:
        away = _mean_distance(np.array(self.measured), steps) - _mean_distance(
            np.sort(steps), steps
        )
        return away - np.mean(away)


class Wasserstein(AbstractObjective):
    """The Wasserstein-1 distance of the law from measured step times, in seconds: see
    [`wasserstein`][]. Smaller is better. It tells by how much steps are off, where the CRPS also
    rewards a law for being certain.
    """

    measured: tuple[float, ...] = eqx.field(converter=_ordered, static=True)

    def value(self, steps: Steps) -> float:
        return float(wasserstein(steps, np.array(self.measured)))

    def slope(self, steps: Steps, width: float) -> Steps:
        order = np.argsort(steps)
        to, of, weights = matched(len(steps), len(self.measured))
        signs = np.sign(steps[order][to] - np.array(self.measured)[of])
        slopes = np.empty(len(steps))
        slopes[order] = np.bincount(to, weights * signs, len(steps))
        return slopes

    def influence(self, steps: Steps, width: float) -> Steps:
        # What more weight on a step adds: the integral of the sign of F - G from the step on.
        points = np.union1d(steps, np.array(self.measured))
        excess = [
            np.searchsorted(np.sort(x), points[:-1], "right") / len(x)
            for x in (steps, np.array(self.measured))
        ]
        pieces = np.sign(excess[0] - excess[1]) * np.diff(points)
        beyond = np.append(np.cumsum(pieces[::-1])[::-1], 0.0)[np.searchsorted(points, steps)]
        return beyond - np.mean(beyond)


def shares(objective: Any, number: int) -> list[Any]:
    """The objective against a random share of its measured steps each, up to `number` shares that
    together are all of them; or as it is, where it has none.
    """
    if not isinstance(objective, CRPS | Wasserstein):
        return [objective] * number
    measured = np.random.default_rng(0).permutation(objective.measured)
    return [type(objective)(x) for x in np.array_split(measured, min(number, len(measured)))]


def _ranks(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The share of `ordered` below each of `at`."""
    sides = [np.searchsorted(ordered, at, side) for side in ("left", "right")]
    return (sides[0] + sides[1]) / (2 * len(ordered))


def _mean_distance(ordered: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The mean distance of each of `at` from all of `ordered`."""
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    below = np.searchsorted(ordered, at)
    return (at * (2 * below - len(ordered)) + total[-1] - 2 * total[below]) / len(ordered)


@dataclasses.dataclass(frozen=True, repr=False)
class Score(Shown):
    """How well a law agrees with measured steps. The noise of each figure is its standard deviation
    due to the finite number of measured steps, from resampling them. Of more than 4,096 steps,
    figures are those of a histogram whose counts are resampled, which takes no longer for more.

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

    def to_json(self) -> dict[str, Any]:
        """A dictionary of each figure, by name."""
        # A ratio to the spread of measured steps that are all equal is not defined.
        rows = plain(self.summary().rows)
        return {"num_steps": self.num_steps} | {row.pop("score"): row for row in rows}

    def summary(self) -> Table:
        rows = [{"score": k, "value": x, "noise": self.noise[k]} for k, x in self.values.items()]
        title = f"Score of a law against {self.num_steps:,} measured steps"
        columns = ("score", *(Column(name, error="noise") for name in ("value", "noise")))
        return Table(columns, rows, title)


def score(law: Law, measured: Any, *, key: "jax.Array") -> Score:
    """Compares a law with measured step times.

    **Arguments:**

    - `law`: from `simulate`.
    - `measured`: step times, in seconds, or a data frame with a column `step_time_s` of them.
    - `key`: a `jax.random` key for resampling.

    **Returns:**

    A [`Score`][].

    **Raises:**

    `ValueError` for fewer than two measured steps, a step that is not a positive number, or steps
    that are more than 200 times as long or short as the law's.
    """
    measured = np.asarray(as_step_times(measured), float)
    if measured.ndim != 1 or len(measured) < 2:
        raise ValueError("Measured steps must be a list of at least two step times, in seconds.")
    if not np.all(np.isfinite(measured) & (measured > 0)):
        raise ValueError("Every measured step time must be a positive number of seconds.")
    check_unit(float(np.median(measured)), float(law.quantile(0.5)))
    predicted = quantiles(law)
    rng = np.random.default_rng(np.asarray(key_data(key)))
    with np.errstate(over="ignore", invalid="ignore"):  # Squares of absurd steps are infinite.
        cells = cells_of(measured)
        figures_of = figures_by_counts(law, predicted, cells)
        values = figures_of(cells.counts)
        drawn = rng.multinomial(len(measured), cells.counts / len(measured), size=_RESAMPLES)
        again = [*map(figures_of, drawn)]
        noise = {name: _scatter([figures[name] for figures in again]) for name in values}
    return Score(len(measured), values, noise)


def _scatter(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.std(finite)) if finite else np.nan
